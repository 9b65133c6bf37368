"""`homing bench serve` against a small server that streams what a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from homing.bench.completion import Completion
from homing.bench.prompts import WORDS, PromptSource
from homing.bench.serve import ServeBenchConfig, run, summarize
from homing.errors import ConfigError

# What a server sends for a request body: whole events, without the "data: " before and the blank
# line after.
Answer = Callable[[dict], list[str]]


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"text": text}], "usage": None})


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> str:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [], "usage": counts | {"prompt_tokens_details": details}})


def a_token_a_word(body: dict) -> list[str]:
    words = len(body["prompt"].split())
    text = [chunk(" word")] * body["max_tokens"]
    return [*text, usage(words, body["max_tokens"], 0), "[DONE]"]


class FakeServer:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.authorization: str | None = None
        self.connections: set[asyncio.Task] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        while head := await read_head(reader):
            length = int(head.get("content-length", "0"))
            body = json.loads(await reader.readexactly(length) or b"{}")
            self.authorization = head.get("authorization")
            if head["path"].endswith("/models"):
                self.send_json(writer, "200 OK", {"data": [{"id": "fake"}]})
            else:
                await self.complete(writer, body)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):  # a client that met an error leaves without reading on
            await writer.wait_closed()

    async def complete(self, writer: asyncio.StreamWriter, body: dict) -> None:
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        events = self.answer(body)
        if events[0][:3].isdigit():
            self.send_json(writer, events[0], {"error": {"message": events[1]}})
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            for event in events:
                data = f"data: {event}\n\n".encode()
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
        self.in_flight -= 1

    def send_json(self, writer: asyncio.StreamWriter, status: str, value: dict) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)


async def read_head(reader: asyncio.StreamReader) -> dict[str, str]:
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return {}
    headers = (line.split(": ", 1) for line in lines if line)
    return {name.lower(): value for name, value in headers} | {"path": first.split()[1]}


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[FakeServer, str]]:
    fake = FakeServer(answer)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    async with server:
        yield fake, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*fake.connections)


async def test_a_run_reports_what_the_server_sent() -> None:
    async with serving(a_token_a_word) as (fake, url):
        config = ServeBenchConfig(
            base_url=url, concurrency=(3,), num_prompts=10, prompt_tokens=40, max_tokens=5
        )
        report = await run(config)
    (result,) = report["results"]
    assert report["model"] == "fake"
    assert result["valid"]
    assert result["errors"] == 0
    assert result["num_requests"] == 10
    assert result["output_tokens"] == 50
    assert result["prompt_tokens_mean"] == 40
    assert result["cached_tokens"] == 0
    assert result["output_tokens_per_s"] == pytest.approx(50 / result["wall_s"], rel=0.05)
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["e2e_ms"]["p99"]
    assert fake.bodies[-1]["ignore_eos"] is True
    assert fake.bodies[-1]["stream_options"] == {"include_usage": True}


async def test_no_more_requests_are_in_flight_than_asked_for() -> None:
    async with serving(a_token_a_word) as (fake, url):
        config = ServeBenchConfig(base_url=url, concurrency=(4,), num_prompts=16, max_tokens=8)
        await run(config)
    assert fake.most_in_flight == 4


async def test_each_concurrency_gives_a_result_with_prompts_of_its_own() -> None:
    async with serving(a_token_a_word) as (fake, url):
        config = ServeBenchConfig(base_url=url, concurrency=(1, 2), num_prompts=3, max_tokens=1)
        report = await run(config)
    assert [result["concurrency"] for result in report["results"]] == [1, 2]
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(set(prompts)) == len(prompts) == 7  # one calibrates


async def test_long_prompts_are_sent_beside_the_measured_ones_one_at_a_time() -> None:
    async with serving(a_token_a_word) as (fake, url):
        config = ServeBenchConfig(
            base_url=url,
            concurrency=(2,),
            num_prompts=20,
            prompt_tokens=10,
            long_prompt_tokens=500,
            max_tokens=4,
        )
        report = await run(config)
    (result,) = report["results"]
    assert result["valid"]
    assert (result["num_requests"], result["output_tokens"]) == (20, 80)
    assert result["long_prompt_ttft_ms"]["p50"] > 0
    long = [body for body in fake.bodies if len(body["prompt"].split()) == 500]
    assert long
    assert {body["max_tokens"] for body in long} == {1}
    assert fake.most_in_flight == 3


async def test_a_long_prompt_that_fails_voids_the_run() -> None:
    def only_short(body: dict) -> list[str]:
        if len(body["prompt"].split()) > 100:
            return ["400 Bad Request", "too long"]
        return a_token_a_word(body)

    async with serving(only_short) as (_, url):
        config = ServeBenchConfig(
            base_url=url, num_prompts=20, prompt_tokens=10, long_prompt_tokens=500, max_tokens=1
        )
        report = await run(config)
    assert not report["results"][0]["valid"]
    assert "too long" in report["results"][0]["first_error"]


async def test_the_number_of_words_follows_the_servers_own_count() -> None:
    def two_tokens_a_word(body: dict) -> list[str]:
        return [chunk("x"), usage(2 * len(body["prompt"].split()), 1, 0), "[DONE]"]

    async with serving(two_tokens_a_word) as (_, url):
        config = ServeBenchConfig(base_url=url, num_prompts=2, prompt_tokens=100, max_tokens=1)
        report = await run(config)
    assert report["results"][0]["prompt_tokens_mean"] == 100


async def test_unexpected_cached_tokens_void_the_run() -> None:
    def always_cached(body: dict) -> list[str]:
        return [chunk("x"), usage(128, 1, 112), "[DONE]"]

    async with serving(always_cached) as (_, url):
        report = await run(ServeBenchConfig(base_url=url, num_prompts=4, max_tokens=1))
    (result,) = report["results"]
    assert not result["valid"]
    assert result["requests_with_unexpected_cached_tokens"] == 4


async def test_the_cached_tokens_of_the_shared_prefix_are_expected() -> None:
    def prefix_cached(body: dict) -> list[str]:
        return [chunk("x"), usage(len(body["prompt"].split()), 1, 96), "[DONE]"]

    async with serving(prefix_cached) as (fake, url):
        config = ServeBenchConfig(
            base_url=url, num_prompts=4, shared_prefix_tokens=100, max_tokens=1
        )
        report = await run(config)
    assert report["results"][0]["valid"]
    starts = {tuple(body["prompt"].split()[:100]) for body in fake.bodies[1:]}
    assert len(starts) == 1


async def test_a_server_without_usage_is_counted_by_its_pieces_of_text() -> None:
    def no_usage(body: dict) -> list[str]:
        return [chunk("x"), chunk("y"), chunk(""), "[DONE]"]

    async with serving(no_usage) as (_, url):
        report = await run(ServeBenchConfig(base_url=url, num_prompts=2))
    (result,) = report["results"]
    assert result["output_tokens"] == 4
    assert result["cached_tokens"] is None
    assert result["prompt_tokens_mean"] is None


async def test_the_api_key_is_sent_and_not_reported() -> None:
    async with serving(a_token_a_word) as (fake, url):
        report = await run(
            ServeBenchConfig(base_url=url, num_prompts=1, max_tokens=1, api_key="secret")
        )
    assert fake.authorization == "Bearer secret"
    assert "secret" not in json.dumps(report)


async def test_connections_are_kept_alive() -> None:
    async with serving(a_token_a_word) as (fake, url):
        await run(ServeBenchConfig(base_url=url, concurrency=(2,), num_prompts=10, max_tokens=2))
    assert len(fake.connections) == 2


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (["429 Too Many Requests", "the queue is full"], "HTTP 429"),
        ([chunk("x"), json.dumps({"error": {"message": "engine lost"}})], "engine lost"),
        ([chunk("x")], "without [DONE]"),
        ([chunk("x"), "{not json"], "DecodeError"),
    ],
)
async def test_a_failed_request_is_an_error_and_voids_the_run(
    events: list[str], message: str
) -> None:
    def fail_after_calibration(body: dict) -> list[str]:
        return events if len(fake.bodies) > 1 else a_token_a_word(body)

    async with serving(fail_after_calibration) as (fake, url):
        report = await run(ServeBenchConfig(base_url=url, num_prompts=2, max_tokens=1))
    (result,) = report["results"]
    assert result["errors"] == 2
    assert message in result["first_error"]
    assert not result["valid"]


async def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    async with serving(a_token_a_word) as (_, url):
        pass
    with pytest.raises(ConfigError, match="does not name a model"):
        await run(ServeBenchConfig(base_url=url))


def test_latencies_are_in_milliseconds_from_the_sending_of_the_request() -> None:
    completion = Completion(started=10.0, content_times=[10.1, 10.15, 10.25], ended=10.3)
    result = summarize([completion], wall_s=0.5, max_cached_tokens=8)
    assert result["ttft_ms"]["mean"] == pytest.approx(100.0)
    assert result["itl_ms"]["mean"] == pytest.approx(75.0)
    assert result["e2e_ms"]["p99"] == pytest.approx(300.0)
    assert result["requests_per_s"] == 2.0


def test_a_seed_repeats_the_prompts_and_no_seed_does_not() -> None:
    def prompts(seed: int | None) -> list[str]:
        source = PromptSource(num_words=50, num_shared_words=10, seed=seed)
        return [source.next_prompt() for _ in range(3)]

    assert prompts(7) == prompts(7)
    assert prompts(None) != prompts(None)


def test_the_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_url_may_name_the_version_or_not(url: str) -> None:
    assert ServeBenchConfig(base_url=url).api_root == "http://h:1/v1/"


def test_a_shared_prefix_leaves_room_for_fresh_words() -> None:
    with pytest.raises(ConfigError, match="--shared-prefix-tokens 128"):
        ServeBenchConfig(shared_prefix_tokens=128)
