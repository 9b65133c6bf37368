"""A thousand clients that ask for streams and do not read them."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from homing.bench.frontend import Bench, FrontendBenchConfig
from homing.bench.processes import processes
from tests.support.serving import wait_until

pytestmark = pytest.mark.timeout(120)

NUM_READERS = 1000
MAX_TOKENS = 200
STEP_S = 0.2
MAX_BYTES_OF_A_READER = 300_000
"""Connection, request and tokens that wait, in the frontend's memory."""


@pytest.fixture
def fleet() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A frontend over an engine that gives each request a token every 200 ms, and its URL."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with processes() as family:
        frontend, url, _ = Bench(FrontendBenchConfig(), family).fleet("fleet", STEP_S)
        yield frontend, url


def slow_reader(url: str) -> socket.socket:
    """A client whose request is sent, and whose socket takes in next to nothing."""
    parts = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((parts.hostname, parts.port))
    body = json.dumps({"prompt": "Hi", "max_tokens": MAX_TOKENS, "stream": True})
    head = f"POST {parts.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall((head + body).encode())
    return client


async def fast_clients(url: str) -> list[str]:
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"prompt": "Hi", "max_tokens": 5}
        replies = await asyncio.gather(*(http.post(url, json=body) for _ in range(4)))
    return [reply.json()["choices"][0]["text"] for reply in replies]


def test_a_thousand_streams_that_nobody_reads_cost_little_and_delay_nobody(fleet) -> None:
    frontend, url = fleet
    fleet_url = f"{url.removesuffix('/v1/completions')}/fleet"

    def now() -> dict[str, Any]:
        return httpx.get(fleet_url, timeout=60).json()

    memory = psutil.Process(frontend.pid).memory_info
    assert asyncio.run(fast_clients(url)) == [" word" * 5] * 4
    before = memory().rss
    with ExitStack() as stack:
        readers = [stack.enter_context(slow_reader(url)) for _ in range(NUM_READERS)]
        wait_until(lambda: now()["totals"]["submitted"] > NUM_READERS, 60, "all are served")
        assert asyncio.run(fast_clients(url)) == [" word" * 5] * 4
        assert memory().rss - before < NUM_READERS * MAX_BYTES_OF_A_READER
        assert len(readers) == NUM_READERS
    wait_until(lambda: now()["requests"] == 0, 60, "everything that they had is free")
    assert asyncio.run(fast_clients(url)) == [" word" * 5] * 4
