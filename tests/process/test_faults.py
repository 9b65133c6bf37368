"""Processes die by SIGKILL while they work: every request ends once, with the right text."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zmq

from tests.support.serving import Serving, serving, wait_until
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(600)

NUM_STREAMS = 16
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--data-parallel-size", "2", "--kv-cache-gb", "1") as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(server: Serving) -> None:
    wait_until(lambda: is_healthy(server), 120, "both ranks serve")


def is_healthy(server: Serving) -> bool:
    try:
        reply = server.health()
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.json()["live_ranks"] == 2


def body_of(number: int) -> dict[str, Any]:
    """Half the streams greedy, half seeded."""
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": 100 + number}
    rng = random.Random(number)
    return {
        "prompt": [rng.randrange(100, 40_000) for _ in range(30)],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **sampling,
    }


class Streams:
    """All streams at once; `received` counts the tokens of each so far."""

    def __init__(self, server: Serving) -> None:
        self._url = f"{server.base_url}/v1/completions"
        self.received = [0] * NUM_STREAMS
        self.tokens: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self.texts = [""] * NUM_STREAMS

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=300) as http:
            await asyncio.gather(*(self._one(http, n) for n in range(NUM_STREAMS)))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        data = ""
        async with http.stream("POST", self._url, json=body_of(number)) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    break
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    self.tokens[number] += choice.get("token_ids") or []
                    self.texts[number] += choice["text"]
                self.received[number] = len(self.tokens[number])
        assert data == "[DONE]"

    async def when_all_have(self, num_tokens: int) -> None:
        async with asyncio.timeout(120):
            while min(self.received) < num_tokens:
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(server: Serving) -> Streams:
    streams = Streams(server)
    asyncio.run(streams.run())
    assert all(count == NUM_TOKENS for count in streams.received)
    return streams


async def test_streams_survive_the_death_of_an_engine_without_gap_or_repeat(server, undisturbed):
    wait_for_idle(server)
    generated = server.metric("homing_generation_tokens_total")
    streams = Streams(server)
    running = asyncio.create_task(streams.run())
    await streams.when_all_have(8)
    received = sum(streams.received)
    pid = server.kill("engine")
    await running
    assert streams.tokens == undisturbed.tokens
    assert streams.texts == undisturbed.texts
    wait_for_idle(server)
    again = server.metric("homing_generation_tokens_total") - generated
    # The dead engine's last words may be missing from the count, never more than what was received
    # before its death plus what one heartbeat holds.
    assert again <= NUM_STREAMS * NUM_TOKENS
    assert again >= NUM_STREAMS * NUM_TOKENS - received - 16 * NUM_STREAMS
    wait_until(lambda: is_healthy(server), 120, "the supervisor brings the rank back")
    assert pid not in {child.pid for child in server.children("engine")}


async def test_streams_survive_the_death_of_the_coordinator(server, undisturbed):
    streams = Streams(server)
    running = asyncio.create_task(streams.run())
    await streams.when_all_have(8)
    server.kill("coordinator")
    await running
    assert streams.tokens == undisturbed.tokens
    assert streams.texts == undisturbed.texts


async def test_streams_of_one_frontend_do_not_notice_the_death_of_its_neighbour(
    server, undisturbed
):
    """Streams of the dead one break, those of the other go on: the dead one has no others."""
    streams = Streams(server)
    tasks = asyncio.create_task(gather_results(streams))
    await streams.when_all_have(4)
    server.kill("frontend")
    broken, whole = await tasks
    assert whole, "the neighbour carried some of the streams"
    for number in whole:
        assert streams.tokens[number] == undisturbed.tokens[number]
    wait_for_idle(server)
    wait_until(lambda: len(server.children("frontend")) == 2, 60, "the frontend is back")
    assert broken | whole == set(range(NUM_STREAMS))


async def gather_results(streams: Streams) -> tuple[set[int], set[int]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=300) as http:
        results = await asyncio.gather(
            *(streams._one(http, n) for n in range(NUM_STREAMS)), return_exceptions=True
        )
    broken = {n for n, result in enumerate(results) if isinstance(result, BaseException)}
    return broken, set(range(NUM_STREAMS)) - broken


def wait_for_idle(server: Serving) -> None:
    """No request runs or waits anywhere, and the heartbeats have said so."""

    def idle() -> bool:
        try:
            metrics = server.metrics()
        except httpx.HTTPError:
            return False
        names = ("homing_num_requests_running", "homing_num_requests_waiting")
        busy = [v for key, v in metrics.items() if key.split("{")[0] in names]
        return bool(busy) and not any(busy)

    wait_until(idle, 60, "the fleet is idle")


def test_garbage_at_the_coordinator_s_port_disturbs_nobody(server):
    command = server.children("coordinator")[0].cmdline()
    address = command[command.index("--bind") + 1]
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    rng = random.Random(5)
    for _ in range(2000):
        socket.send_multipart(
            [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 5))]
        )
    reply = httpx.post(
        f"{server.base_url}/v1/completions", json={"prompt": "Hello", "max_tokens": 4}, timeout=60
    )
    assert reply.status_code == 200
    socket.close(linger=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_is_left_when_the_launcher_ends(number, tmp_path):
    model = str(make_tiny_model("llama", tmp_path / "tiny"))
    with serving(model, "--data-parallel-size", "1", "--frontend-replicas", "1") as family:
        family.remember()
        os.kill(family.process.pid, number)
        wait_until(lambda: not family.survivors(), 10, "every process has ended")
        code = family.process.wait(10)
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
