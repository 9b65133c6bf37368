"""A frontend over a fake fleet, on a real socket of the loopback interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from homing.frontend.access import AccessSettings
from homing.frontend.app import create_app
from homing.frontend.measures import Measures
from homing.frontend.server import TlsFiles, listen, serve_http
from homing.frontend.service import ModelSettings, Service
from tests.support.byte_model import CHAT_TEMPLATE, byte_level
from tests.support.fake_fleet import FakeClient, Script


@dataclass
class Frontend:
    """What a test talks to."""

    host: str
    port: int
    http: httpx.AsyncClient
    fleet: FakeClient
    measures: Measures
    stop: asyncio.Event
    serving: asyncio.Task[None]

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that succeeds."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return strict_json(response.text)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that ends as it should; its last one, [DONE], left out."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        *events, done = [data for data in sse_data(response.text)]
        assert done == "[DONE]"
        return [strict_json(event) for event in events]

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, each as soon as it comes."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield strict_json(line.removeprefix("data: "))

    async def error(self, path: str, body: Any, status: int) -> dict[str, Any]:
        """The error object that a request is answered with."""
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        response = await self.http.post(path, content=content)
        assert response.status_code == status, response.text
        error = strict_json(response.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error


def sse_data(text: str) -> list[str]:
    """The data of each event in a body of server-sent events; comments are none."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def strict_json(text: str) -> Any:
    """Parsed as RFC 8259 has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@asynccontextmanager
async def serving(
    directory: Path,
    script: Script,
    *,
    names: tuple[str, ...] = (),
    drain_s: float = 2.0,
    wait: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    bos: bool = True,
    model_settings: dict[str, Any] | None = None,
    access: AccessSettings | None = None,
    tls: TlsFiles | None = None,
    **fleet_options: Any,
) -> AsyncIterator[Frontend]:
    """Serve a byte-level tokenizer, written to `directory`, and a scripted model until the block
    ends. `wait`: only go on once the frontend knows the model."""
    byte_level(directory, chat_template=chat_template, bos=bos)
    fleet = FakeClient(str(directory), script, **fleet_options)
    settings = ModelSettings(names=names, **(model_settings or {}))
    service = Service(fleet, settings)  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    joining = asyncio.create_task(service.join(1.0))
    if wait:
        await joining
    stop = asyncio.Event()
    server = asyncio.create_task(
        serve_http(
            create_app(service, access),
            listener.detach(),
            stop=stop,
            drain_s=drain_s,
            end_requests=service.close,
            tls=tls,
        )
    )
    base = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        # No certificates: reading those of the system takes longer than most tests.
        async with httpx.AsyncClient(base_url=base, timeout=30, verify=False) as http:
            yield Frontend(host, port, http, fleet, service.measures, stop, server)
    finally:
        stop.set()
        await server
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


async def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition. Raises `TimeoutError` when it does not come about."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)
