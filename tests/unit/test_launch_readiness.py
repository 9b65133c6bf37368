"""When a launch calls itself ready, against frontends that answer what a test tells them to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest

from homing.errors import Unavailable
from homing.launch.readiness import Fleet, wait_until_ready


def health(pid: int, live_ranks: int, status: str = "ok") -> dict:
    return {"status": status, "pid": pid, "model": "little", "live_ranks": live_ranks}


class FakeFrontends:
    """Answers /health with one of `answers` after the other, as the kernel spreads connections."""

    def __init__(self, answers: Iterable[dict | None]) -> None:
        self.answers: Iterator[dict | None] = iter(answers)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer = next(self.answers)
        if answer is not None:
            body = json.dumps(answer).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def fleet_of(
    *answers: dict | None, num_frontends: int = 2, num_ranks: int = 2
) -> AsyncIterator[tuple[Fleet, FakeFrontends]]:
    frontends = FakeFrontends(answers)
    server = await asyncio.start_server(frontends.handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Fleet("127.0.0.1", port, num_frontends=num_frontends, num_ranks=num_ranks), frontends


async def test_it_is_ready_when_each_frontend_has_said_that_all_ranks_serve() -> None:
    answers = [health(1, 2), health(1, 2), health(2, 1), health(2, 2), health(1, 2)]
    async with fleet_of(*answers) as (fleet, frontends):
        assert await wait_until_ready(fleet, timeout_s=60) == "little"
        assert len(list(frontends.answers)) == 1, "it asked until the fourth answer"


async def test_a_frontend_that_cannot_serve_yet_is_not_ready_whatever_the_ranks() -> None:
    answers = [health(1, 2), health(2, 2, status="loading"), health(2, 2)]
    async with fleet_of(*answers) as (fleet, frontends):
        await wait_until_ready(fleet, timeout_s=60)
        assert list(frontends.answers) == []


async def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    async with fleet_of(None, health(1, 1), num_frontends=1, num_ranks=1) as (fleet, _):
        assert await wait_until_ready(fleet, timeout_s=60) == "little"


async def test_past_the_deadline_the_error_says_what_is_missing() -> None:
    forever = (health(1, 1) for _ in range(10_000))
    async with fleet_of(*forever) as (fleet, _):
        with pytest.raises(
            Unavailable,
            match="1 of 2 engine ranks serve, 1 of 2 frontends answer",
        ):
            await wait_until_ready(fleet, timeout_s=0.3)
