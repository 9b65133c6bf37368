"""One HTTP request between server and application: its body, its answer, its client's leaving.

A body that is too large is read to its end and thrown away, then answered with 413: a server that
answers at once and closes resets the connection under a client that is still sending, and the
client never reads why.

Quart's own class makes three tasks more of a request: for what comes in, for the answer, and for
the time to send it. Here the server's task answers, and one waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import msgspec
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from quart import Quart, Request, Response
from quart.asgi import ASGIHTTPConnection
from quart.utils import encode_headers
from quart.wrappers.response import DataBody

from homing.frontend.http_errors import http_error_body

MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
"""A client that has not sent its body by then is cut off."""


class Connection(ASGIHTTPConnection):
    """Hands the application whole bodies of at most `MAX_BODY_BYTES`."""

    def __init__(self, app: Quart, scope: HTTPScope) -> None:
        super().__init__(app, scope)
        self._is_answered = False
        self._client_left = False

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read_body(receive)
        except TimeoutError:
            await _send_error(self.scope, send, 408, f"no whole body within {BODY_TIMEOUT_S:g} s")
            return
        if body is None:
            message = f"the request body is larger than the limit of {MAX_BODY_BYTES} bytes"
            await _send_error(self.scope, send, 413, message)
            return
        request = self._create_request_from_scope(send)
        request.body.set_result(body)
        request.body_timeout = None  # it is here: to wait for it would take a task
        answering = asyncio.current_task()
        assert answering is not None
        watching = asyncio.create_task(self._watch(receive, answering))
        try:
            await self.handle_request(request, send)
        except asyncio.CancelledError:
            if not self._client_left:
                raise
            answering.uncancel()
        finally:
            watching.cancel()

    async def _watch(self, receive: ASGIReceiveCallable, answering: asyncio.Task[Any]) -> None:
        """Wait for the client to leave, and then end the answer unless all of it is on its way."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered:
            self._client_left = True
            answering.cancel()

    async def handle_request(self, request: Request, send: ASGISendCallable) -> None:
        response = cast(Response, await self.app.handle_request(request))
        given = response.timeout
        with suppress(TimeoutError):  # the client does not read
            async with asyncio.timeout(
                self.app.config["RESPONSE_TIMEOUT"] if given is Ellipsis else given
            ):
                await self._send(response, send)

    async def _send(self, response: Response, send: ASGISendCallable) -> None:
        headers = encode_headers(response.headers)
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        last = b""
        if isinstance(response.response, DataBody):
            last = response.response.data
        else:
            async with response.response as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        self._is_answered = True
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _read_body(receive: ASGIReceiveCallable) -> bytes | None:
    """The body; None if it was too large, or empty if the client left."""
    body = bytearray()
    too_large = False
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        too_large = too_large or len(body) + len(message["body"]) > MAX_BODY_BYTES
        if too_large:
            body.clear()
        else:
            body += message["body"]
        if not message["more_body"]:
            return None if too_large else bytes(body)


async def _send_error(scope: HTTPScope, send: ASGISendCallable, status: int, message: str) -> None:
    body = msgspec.json.encode(http_error_body(status, message))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    headers += [pair for pair in scope["headers"] if pair[0].lower() == b"x-request-id"]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
