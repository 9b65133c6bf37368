"""`python -m homing.bench.bare_app`: Quart on Hypercorn and nothing else, to compare with.

It answers the frontend bench's requests with bodies of about the same size, without reading them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

import tyro
import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config
from quart import Quart, Response, request

from homing.observe import watch_lifeline

EVENT = b"data: " + b"x" * 160 + b"\n\n"
BODY = b"x" * 500


@dataclass(frozen=True)
class BareApp:
    fd: int
    """A listening socket."""
    events: int
    """Of a streamed answer."""
    step_s: float
    """Between two of them."""
    lifeline_fd: int

    async def run(self) -> None:
        app = Quart("bare")

        @app.post("/v1/completions")
        async def completions() -> Response:
            body = cast(bytes, await request.get_data())
            if b'"stream": true' not in body:
                return Response(BODY, mimetype="application/json")
            return Response(self._events(), mimetype="text/event-stream")

        config = Config()
        config.bind = [f"fd://{self.fd}"]
        config.keep_alive_max_requests = 1_000_000
        await serve(app, config, shutdown_trigger=asyncio.Event().wait)

    async def _events(self) -> AsyncIterator[bytes]:
        for _ in range(self.events):
            await asyncio.sleep(self.step_s)
            yield EVENT


def main() -> None:
    app = tyro.cli(BareApp)
    watch_lifeline(app.lifeline_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(app.run())


if __name__ == "__main__":
    main()
