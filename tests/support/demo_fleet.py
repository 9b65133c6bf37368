"""A frontend's page over a fleet that a script plays: what it does depends on the poll's number."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from quart import Quart, Response, request

from homing.client import FleetView
from homing.errors import Unavailable
from homing.frontend.http_errors import error_body, status_of
from homing.frontend.page import page_routes
from homing.frontend.server import listen, serve_http
from homing.wire import FleetState, ModelCard

CARD = ModelCard(
    name="SmolLM2-135M-Instruct",
    tokenizer_dir="",
    max_context_tokens=8192,
    vocab_size=49152,
    eos_token_ids=(2,),
    block_size=16,
)


class DemoFleet:
    """Three ranks; the last one is gone."""

    def __init__(self) -> None:
        self.polls = 0
        self.down = False
        self.state = FleetState.RUNNING
        self.recent: list[dict[str, Any]] = []
        self.measures_ttft = False
        self.api_key: str | None = None

    def view(self) -> FleetView:
        return FleetView(
            connected=True, state=self.state, policy="prefix_affinity", live_ranks=2, card=CARD
        )

    async def snapshot(self) -> dict[str, Any]:
        if self.down:
            raise Unavailable("the coordinator does not answer")
        self.polls += 1
        ranks = [self._rank(rank) for rank in range(3)]
        totals: dict[str, float] = {}
        for row in ranks:
            for name, value in row["counters"].items():
                totals[name] = totals.get(name, 0) + value
        if self.measures_ttft:
            ttft = "time_to_first_token_seconds"
            totals[f"{ttft}.count"] = self.polls
            totals[f"{ttft}.sum"] = self.polls * 0.12 - 0.4 * math.cos(self.polls / 14)
        return {
            "live_ranks": 2,
            "ranks": ranks,
            "clients": 2,
            "requests": sum(row["load"] for row in ranks),
            "totals": totals,
            "submitted": 40 + self.polls,
            "resubmissions": 2,
            "refused": {"overloaded": 1},
            "lost_requests": 2,
            "lost_ranks": 1,
            "recent": self.recent,
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        n, live = self.polls, rank < 2
        load = (3 + rank + round(2 * math.sin(n / 9 + rank))) if live else 0
        return {
            "rank": rank,
            "live": live,
            "state": self.state.value,
            "load": load,
            "dispatched": 20 + n,
            "running": max(0, load - 1),
            "waiting": min(1, load),
            "owed_tokens": 128 * rank,
            "kv_used_blocks": 700 + 240 * rank + 3 * n if live else 0,
            "kv_total_blocks": 2048 if live else 0,
            "counters": {
                "prompt_tokens": 1000 + 300 * n if live else 900,
                "cached_tokens": 200 + (200 + 40 * rank) * n - round(900 * math.cos(n / 17))
                if live
                else 300,
                "generated_tokens": 5000 + round(60 * n - 500 * math.cos(n / 11 + rank))
                if live
                else 0,
                "preemptions": 0,
                "prefilled_tokens": 500 + 100 * n,
                "requests_finished": n,
            },
        }


def demo_app(fleet: DemoFleet, *, words: list[str], until: asyncio.Event | None = None) -> Quart:
    """The page, and a model that answers everything with `words`; with `until`, it writes its last
    word then."""
    app = Quart(__name__)
    app.register_blueprint(page_routes(fleet.snapshot, fleet.view))

    @app.before_request
    async def check_key() -> tuple[Any, int] | None:
        given = request.headers.get("Authorization")
        if request.path == "/fleet" and fleet.api_key and given != f"Bearer {fleet.api_key}":
            return {"error": {"message": "a key is needed"}}, 401
        return None

    @app.errorhandler(Unavailable)
    async def on_unavailable(error: Unavailable) -> tuple[Any, int]:
        return error_body(error), status_of(error)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        body = await request.get_json()
        response = Response(_answer(body, words, until), mimetype="text/event-stream")
        response.timeout = None
        return response

    return app


async def _answer(
    body: dict[str, Any], words: list[str], until: asyncio.Event | None
) -> AsyncIterator[bytes]:
    prompt_tokens = 8 * len(body["messages"])
    yield _chunk({"role": "assistant", "content": ""}, prompt_tokens, 0)
    for count, word in enumerate(words, start=1):
        if until and count == len(words):
            await until.wait()
        yield _chunk({"content": word}, prompt_tokens, count)
    yield _chunk({}, prompt_tokens, len(words), finish_reason="stop")
    yield b"data: [DONE]\n\n"


def _chunk(
    delta: dict[str, Any], prompt_tokens: int, count: int, finish_reason: str | None = None
) -> bytes:
    chunk = {
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens - 8},
        },
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@asynccontextmanager
async def serving(app: Quart) -> AsyncIterator[str]:
    """The address of the page, until the block ends."""
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    stop = asyncio.Event()

    async def nothing() -> None:
        pass

    server = asyncio.create_task(
        serve_http(app, listener.detach(), stop=stop, drain_s=0.5, end_requests=nothing)
    )
    try:
        yield f"http://{host}:{port}/"
    finally:
        stop.set()
        await server
