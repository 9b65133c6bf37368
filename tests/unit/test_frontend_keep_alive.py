"""How long a connection stays open: as long as somebody may still use it, and no longer."""

from __future__ import annotations

import asyncio
import os

import pytest

from homing.client import Part
from homing.frontend import server
from homing.frontend.keep_alive import ConnectionServer
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import STOP, says
from tests.support.http_frontend import serving, until

REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":200}'
CHAT_REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
    len(CHAT),
    CHAT,
)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200")
    length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
    return await reader.readexactly(int(length))


@pytest.mark.parametrize("num_requests", [0, 1, 3])
async def test_a_connection_that_its_client_closed_is_closed(tmp_path, num_requests):
    """At once, not when it has been idle for long: a process may have so many files open."""
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        before = num_open_files()
        for _ in range(5):
            reader, writer = await asyncio.open_connection(frontend.host, frontend.port)
            for _ in range(num_requests):
                writer.write(REQUEST)
                await read_answer(reader)
            writer.close()
            await writer.wait_closed()
        await until(lambda: num_open_files() <= before, timeout_s=10.0)


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    gate = asyncio.Event()
    steps = [gate, Part(token_ids=byte_ids("a"), finish=STOP)]
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        idle, idle_writer = await asyncio.open_connection(frontend.host, frontend.port)
        reader, writer = await asyncio.open_connection(frontend.host, frontend.port)
        writer.write(CHAT_REQUEST)
        assert await asyncio.wait_for(idle.read(), 30.0) == b""
        await asyncio.sleep(0.2)  # several times as long as an idle one has
        gate.set()
        assert b'"content":"a"' in await asyncio.wait_for(read_answer(reader), 30.0)
        assert await asyncio.wait_for(reader.read(), 30.0) == b""
        for each in (idle_writer, writer):
            each.close()


async def test_each_request_gives_a_connection_its_whole_time_again(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 2.0)
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        reader, writer = await asyncio.open_connection(frontend.host, frontend.port)
        for _ in range(4):
            writer.write(REQUEST)
            await read_answer(reader)
            await asyncio.sleep(0.7)
        assert not reader.at_eof()
        writer.close()


async def test_a_stop_does_not_wait_for_idle_connections(tmp_path):
    async with serving(tmp_path, says(byte_ids("x")), drain_s=100.0) as frontend:
        never_asked, one = await asyncio.open_connection(frontend.host, frontend.port)
        answered, other = await asyncio.open_connection(frontend.host, frontend.port)
        other.write(REQUEST)
        await read_answer(answered)
        frontend.stop.set()
        await asyncio.wait_for(frontend.serving, 30.0)
        assert await never_asked.read() == await answered.read() == b""
        for writer in (one, other):
            writer.close()


async def test_hypercorn_serves_by_our_server_of_a_connection(tmp_path, monkeypatch):
    """It is put in Hypercorn's module: another version may look for it elsewhere."""
    served: list[ConnectionServer] = []
    run = ConnectionServer.run

    async def noted(self: ConnectionServer) -> None:
        served.append(self)
        await run(self)

    monkeypatch.setattr(ConnectionServer, "run", noted)
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.http.get("/v1/models")
        assert len(served) == 1
