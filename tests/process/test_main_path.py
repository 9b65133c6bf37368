"""The demo model through real frontends, coordinator and two engines, asked by real clients."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from homing.tokenizer import Tokenizer
from tests.support.backends import demo_files
from tests.support.reference import greedy_choices
from tests.support.serving import Serving, serving, wait_until

pytestmark = pytest.mark.timeout(600)

MODEL = "SmolLM2-135M-Instruct"
BLOCK = 16
PREFILLED = "homing_prefill_tokens_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--data-parallel-size", "2", "--dtype", "fp32", "--kv-cache-gb", "1") as running:
        yield running


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return demo_files().directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


def random_prompt(num_tokens: int) -> list[int]:
    """Fresh in every run, so that nothing of it is cached."""
    return [random.SystemRandom().randrange(100, 40_000) for _ in range(num_tokens)]


def complete(server: Serving, **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0} | body
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def stream(
    http: httpx.AsyncClient, server: Serving, **body: Any
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed completion; `[DONE]` must end it."""
    body = {"model": MODEL, "temperature": 0, "stream": True} | body
    url = f"{server.base_url}/v1/completions"
    async with http.stream("POST", url, json=body, timeout=300) as reply:
        assert reply.status_code == 200, await reply.aread()
        data = ""
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                if data != "[DONE]":
                    yield json.loads(data)
        assert data == "[DONE]"


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids") or []
    ]


def cached_tokens(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def by_rank(server: Serving, name: str) -> dict[str, float]:
    return {k: v for k, v in server.metrics().items() if k.startswith(f"homing_{name}{{")}


def test_the_openai_client_gets_a_real_answer_streamed_and_not(server):
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="EMPTY")
    assert [model.id for model in client.models.list()] == [MODEL]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"model": MODEL, "messages": question, "temperature": 0}
    whole = client.chat.completions.create(**options, max_tokens=24)
    assert "Paris" in (whole.choices[0].message.content or "")
    parts = client.chat.completions.create(**options, max_tokens=24, stream=True)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == whole.choices[0].message.content


async def test_32_concurrent_streams_equal_the_whole_answers_and_transformers(
    server, tokenizer, model_dir
):
    prompts = [f"Question {n}: tell me about the number {n}.\nAnswer:" for n in range(32)]
    body: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "return_token_ids": True}

    async def one(http: httpx.AsyncClient, prompt: str) -> list[dict[str, Any]]:
        return [chunk async for chunk in stream(http, server, prompt=prompt, **body)]

    async with httpx.AsyncClient() as http:
        streams = await asyncio.gather(*(one(http, prompt) for prompt in prompts))
    whole = complete(server, prompt=prompts, **body)["choices"]
    for prompt, chunks, choice in zip(prompts, streams, whole, strict=True):
        assert len(tokens_of(chunks)) == 64
        assert tokens_of(chunks) == choice["token_ids"], prompt
        assert text_of(chunks) == choice["text"]
        with_text = [chunk for chunk in chunks if text_of([chunk])]
        assert len(with_text) > 20, "chunks arrive as they are generated, not in one piece"
    for index in range(0, 32, 4):
        answer = tokens_of(streams[index])
        assert answer == greedy_choices(model_dir, tokenizer.encode(prompts[index]), answer)


async def test_a_request_that_joins_16_running_decodes_gets_its_first_token_before_any_ends(server):
    events: list[str] = []
    all_started = asyncio.Event()

    async def long_one(http: httpx.AsyncClient, number: int) -> None:
        started = False
        prompt = random_prompt(20)
        async for _ in stream(http, server, prompt=prompt, max_tokens=100, ignore_eos=True):
            if not started:
                started = True
                events.append("started")
                if events.count("started") == 16:
                    all_started.set()
        events.append("ended")

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as http:
        tasks = [asyncio.create_task(long_one(http, number)) for number in range(16)]
        await all_started.wait()
        async for _ in stream(http, server, prompt=random_prompt(20), max_tokens=5):
            events.append("joined")
            break
        await asyncio.gather(*tasks)
    assert events.index("joined") < events.index("ended")


def test_a_second_identical_prompt_is_found_in_the_cache_of_the_same_rank(server):
    prompt = random_prompt(1000)
    first = complete(server, prompt=prompt, max_tokens=8, ignore_eos=True)
    prefilled = settled_metric(server, PREFILLED)
    second = complete(server, prompt=prompt, max_tokens=8, ignore_eos=True)
    assert cached_tokens(first) == 0
    # Each rank has its own cache, so a hit is proof that both went to the same.
    assert 1000 - BLOCK <= cached_tokens(second) < 1000
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert settled_metric(server, PREFILLED) - prefilled == 1000 - cached_tokens(second)


def test_a_prompt_that_shares_600_of_1000_tokens_computes_only_the_rest(server):
    prompt = random_prompt(1000)
    complete(server, prompt=prompt, max_tokens=1)
    prefilled = settled_metric(server, PREFILLED)
    second = complete(server, prompt=prompt[:600] + random_prompt(400), max_tokens=1)
    assert 600 - BLOCK <= cached_tokens(second) <= 600
    assert settled_metric(server, PREFILLED) - prefilled == 1000 - cached_tokens(second)


def settled_metric(server: Serving, name: str) -> float:
    """A counter after the heartbeats that carry it have come: it has not moved for a while."""
    values: list[float] = []

    def steady() -> bool:
        values.append(server.metric(name))
        return len(values) > 20 and len(set(values[-20:])) == 1

    wait_until(steady, 60, f"{name} settles")
    return values[-1]


async def test_requests_that_share_a_prefix_do_not_all_queue_on_one_idle_rank(server):
    shared = random_prompt(200)
    before = by_rank(server, "requests_dispatched_total")
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as http:

        async def one() -> None:
            prompt = shared + random_prompt(20)
            async for _ in stream(http, server, prompt=prompt, max_tokens=40, ignore_eos=True):
                pass

        await asyncio.gather(*(one() for _ in range(10)))
    after = by_rank(server, "requests_dispatched_total")
    shares = [after[key] - before[key] for key in after]
    assert sum(shares) == 10
    assert min(shares) >= 2


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"[]", 400), (b'"x"', 400), (b'{"model": "other", "prompt": "x"}', 404)],
)
def test_bad_bodies_are_refused_with_an_openai_error(server, content, status):
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{server.base_url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_an_oversized_prompt_is_refused_and_others_go_on(server):
    body = {"model": MODEL, "prompt": [5] * 9000}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "maximum context length" in reply.json()["error"]["message"]
    assert complete(server, prompt="Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_seeded_sampling_is_the_same_on_every_rank_and_in_any_company(server):
    body: dict[str, Any] = {"max_tokens": 16, "temperature": 0.9, "seed": 11, "ignore_eos": True}
    alone = complete(server, prompt="Once upon a time", **body)["choices"][0]["text"]
    crowd = complete(server, prompt=["Once upon a time"] * 8, **body)["choices"]
    assert {choice["text"] for choice in crowd} == {alone}
    other = complete(server, prompt="Once upon a time", **(body | {"seed": 12}))
    assert other["choices"][0]["text"] != alone
