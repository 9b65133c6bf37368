"""Clients that leave, connections that stay, servers that stop: over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from homing.client import Part
from homing.frontend import server, stream
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import STOP, says
from tests.support.http_frontend import serving, sse_data, until

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


def request_bytes(body, path=CHAT):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def leave(writer, *, reset):
    if reset:
        writer.transport.abort()
    else:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
async def test_a_client_that_leaves_takes_its_generations_with_it(tmp_path, streamed, begun, reset):
    """Also before the first token, when nothing was sent that could fail."""
    never = asyncio.Event()
    steps = [Part(token_ids=byte_ids("a")), never] if begun else [never]
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        reader, writer = await asyncio.open_connection(frontend.host, frontend.port)
        writer.write(request_bytes({**HELLO, "stream": streamed, "n": 2}))
        await until(lambda: len(frontend.fleet.running) == 2)
        if streamed and begun:
            await reader.readuntil(b'"content":"a"')
        await leave(writer, reset=reset)
        await until(lambda: not frontend.fleet.running, timeout_s=1.0)
        assert all(generation.cancelled.is_set() for generation in frontend.fleet.submitted)


async def test_a_client_that_leaves_while_its_stream_flows_ends_it(tmp_path):
    def endless(prompt, params):
        while True:
            yield Part(token_ids=byte_ids("a" * 50))

    async with serving(tmp_path, endless) as frontend:
        reader, writer = await asyncio.open_connection(frontend.host, frontend.port)
        writer.write(request_bytes({**HELLO, "stream": True}))
        await reader.readuntil(b'"content":"a')
        await leave(writer, reset=True)
        await until(lambda: not frontend.fleet.running, timeout_s=1.0)


async def test_an_answer_that_ends_is_not_cancelled(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post(CHAT, HELLO)
        await frontend.stream(CHAT, HELLO)
        assert not any(generation.cancelled.is_set() for generation in frontend.fleet.submitted)


async def test_chunks_arrive_as_they_are_generated(tmp_path):
    gates = [asyncio.Event(), asyncio.Event()]
    steps = [
        Part(token_ids=byte_ids("a")),
        gates[0],
        Part(token_ids=byte_ids("b")),
        gates[1],
        Part(token_ids=byte_ids("c"), finish=STOP),
    ]
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        texts = []
        async for event in frontend.events(CHAT, HELLO):
            texts.append(event["choices"][0]["delta"]["content"])
            if texts[-1] in ("a", "b"):  # the next is not generated before this one was read
                gates["ab".index(texts[-1])].set()
    assert texts == ["", "a", "b", "c"]


async def test_a_silent_stream_has_comments_that_keep_it_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(stream, "FIRST_PART_S", 0.01)
    gate = asyncio.Event()
    steps = [gate, Part(token_ids=byte_ids("a"), finish=STOP)]
    async with serving(tmp_path, lambda prompt, params: steps, drain_s=100.0) as frontend:
        body = {**HELLO, "stream": True}
        lines = []
        async with frontend.http.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    gate.set()
    text = "\n".join(lines)
    assert lines.count(": keep-alive") >= 3
    assert sse_data(text.strip("\n"))[-1] == "[DONE]"


async def test_one_connection_serves_one_request_after_another(tmp_path):
    """Of the kind of random resets: clients keep idle connections, usually for 5 to 75 s."""
    assert server.KEEP_ALIVE_S >= 75
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        reader, writer = await asyncio.open_connection(frontend.host, frontend.port)
        for streamed in (False, True, False, True):
            writer.write(request_bytes({**HELLO, "stream": streamed}))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in head.lower()
            if streamed:
                await reader.readuntil(b"data: [DONE]\n\n")
                await reader.readuntil(b"0\r\n\r\n")
            else:
                length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
        await leave(writer, reset=False)


async def test_a_client_that_breaks_off_its_body_does_no_harm(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        _, writer = await asyncio.open_connection(frontend.host, frontend.port)
        writer.write(request_bytes(HELLO)[:-5])
        await writer.drain()
        await leave(writer, reset=True)
        await frontend.post(CHAT, HELLO)
        assert len(frontend.fleet.submitted) == 1


async def test_a_stop_lets_running_answers_end_and_takes_no_new_ones(tmp_path):
    gate = asyncio.Event()
    steps = [gate, Part(token_ids=byte_ids("a"), finish=STOP)]
    async with serving(tmp_path, lambda prompt, params: steps, drain_s=100.0) as frontend:
        answering = asyncio.create_task(frontend.post(CHAT, HELLO))
        await until(lambda: len(frontend.fleet.running) == 1)
        frontend.stop.set()
        await until(lambda: not accepts(frontend))
        gate.set()
        assert (await answering)["choices"][0]["message"]["content"] == "a"
        await asyncio.wait_for(frontend.serving, 30.0)


def accepts(frontend):
    with socket.socket() as probe:
        return probe.connect_ex((frontend.host, frontend.port)) == 0


async def test_a_stop_does_not_wait_for_ever_and_tells_whoever_waits(tmp_path):
    never = asyncio.Event()
    steps = [Part(token_ids=byte_ids("a")), never]
    async with serving(tmp_path, lambda prompt, params: steps, drain_s=0.1) as frontend:
        whole = asyncio.create_task(frontend.http.post(CHAT, json=HELLO))
        streamed = asyncio.create_task(frontend.http.post(CHAT, json={**HELLO, "stream": True}))
        await until(lambda: len(frontend.fleet.running) == 2)
        frontend.stop.set()
        await asyncio.wait_for(frontend.serving, 30.0)
        assert (await whole).status_code == 503
        assert "error" in json.loads(sse_data((await streamed).text)[-1])


async def test_what_waits_for_a_slow_reader_is_joined_and_nothing_of_it_is_lost(tmp_path):
    """More than the kernel holds of a connection, some megabytes, is there before any is read."""
    num_tokens = 40_000

    def endless(prompt, params):
        for index in range(num_tokens):
            yield Part(token_ids=byte_ids("ab"[index % 2]))
        yield Part(token_ids=[], finish=STOP)

    async with serving(tmp_path, endless, max_context_tokens=2**20) as frontend:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((frontend.host, frontend.port))
            reader, writer = await asyncio.open_connection(sock=client, limit=2**12)
            body = {"messages": HELLO["messages"], "stream": True}
            writer.write(request_bytes(body))
            await until(lambda: bool(frontend.fleet.submitted and not frontend.fleet.running), 60)
            received = await reader.readuntil(b"\r\n\r\n")
            assert received.startswith(b"HTTP/1.1 200")
            chunks = []
            while size := int(await reader.readline(), 16):
                chunks.append((await reader.readexactly(size + 2))[:-2])
            writer.close()
    events = [json.loads(data) for data in sse_data(b"".join(chunks).decode())[:-1]]
    texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(texts) == "ab" * (num_tokens // 2)
    assert len(texts) < 0.8 * num_tokens
