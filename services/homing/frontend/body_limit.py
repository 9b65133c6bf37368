"""Bodies that are too large are read to their end and thrown away, then answered with 413.

A server that answers at once and closes resets the connection under a client that is still sending,
and the client never reads why. Works on ASGI messages, between server and application.
"""

from __future__ import annotations

import asyncio

import msgspec
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    HTTPScope,
    Scope,
)

from homing.frontend.http_errors import http_error_body

MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
"""A client that has not sent its body by then is cut off."""


class BodyLimit:
    """Hands the application whole bodies of at most `MAX_BODY_BYTES`."""

    def __init__(self, app: ASGIFramework) -> None:
        self._app = app

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read_body(receive)
        except TimeoutError:
            await _send_error(scope, send, 408, f"no whole body within {BODY_TIMEOUT_S:g} s")
            return
        if body is None:
            message = f"the request body is larger than the limit of {MAX_BODY_BYTES} bytes"
            await _send_error(scope, send, 413, message)
        else:
            await self._app(scope, _replay(body, receive), send)


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


def _replay(body: bytes, receive: ASGIReceiveCallable) -> ASGIReceiveCallable:
    """A `receive` that gives the body first, and then what the server has to say."""
    pending: list[ASGIReceiveEvent] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> ASGIReceiveEvent:
        return pending.pop() if pending else await receive()

    return receive_next


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
