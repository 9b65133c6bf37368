"""The openai package against a frontend, as users have it: typed replies, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from homing.client import Part
from homing.errors import Overloaded, RequestLost
from homing.wire import Finish, FinishReason
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import parts, says
from tests.support.http_frontend import Frontend, serving, until

HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(tmp_path, script, **options) -> AsyncIterator[tuple[Any, Frontend]]:
    """An `AsyncOpenAI` that talks to a frontend over a scripted fleet, and the frontend.

    Untyped: tests look at what came, whatever the package's types say may come.
    """
    async with serving(tmp_path, script, **options) as frontend:
        base_url = f"http://{frontend.host}:{frontend.port}/v1"
        transport = openai.DefaultAsyncHttpxClient(verify=False)  # nothing here is encrypted
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key="-", max_retries=0, http_client=transport
        ) as client:
            yield client, frontend


async def test_a_chat_completion(tmp_path):
    script = says(byte_ids("héllo 😀"), num_cached_tokens=16)
    async with client_of(tmp_path, script) as (client, _):
        reply = await client.chat.completions.create(model="fake", messages=HI)
        assert reply._request_id
    assert reply.choices[0].message.content == "héllo 😀"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens == 16
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_a_streamed_chat_completion_with_usage(tmp_path):
    async with client_of(tmp_path, says(byte_ids("héllo 😀"))) as (client, _):
        stream = await client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == "héllo 😀"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(byte_ids("héllo 😀"))
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_stream_helper_gathers_choices_and_log_probs(tmp_path):
    async with (
        client_of(tmp_path, says(byte_ids("né"))) as (client, _),
        client.chat.completions.stream(
            model="fake", messages=HI, n=2, logprobs=True, top_logprobs=2
        ) as stream,
    ):
        completion = await stream.get_final_completion()
    for choice in completion.choices:
        assert choice.message.content == "né"
        assert choice.finish_reason == "stop"
        assert bytes(b for entry in choice.logprobs.content for b in entry.bytes).decode() == "né"
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


async def test_a_completion_and_its_stream(tmp_path):
    finish = Finish(FinishReason.STOP, stop="END")
    async with client_of(tmp_path, says(byte_ids("oneEND"), finish=finish)) as (client, _):
        arguments = {
            "model": "fake",
            "prompt": ["x", "yz"],
            "stop": ["END"],
            "logprobs": 1,
            "echo": True,
        }
        whole = await client.completions.create(**arguments)
        texts = ["", ""]
        async for chunk in await client.completions.create(**arguments, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == texts == ["xone", "yzone"]
    assert whole.choices[1].logprobs.text_offset == [0, 1, 2, 3, 4, 5, 5, 5]


async def test_fields_of_vllm_are_given_as_extra_body(tmp_path):
    async with client_of(tmp_path, says(byte_ids("x"))) as (client, frontend):
        extra = {"top_k": 3, "return_token_ids": True, "cache_salt": "s"}
        reply = await client.completions.create(model="fake", prompt="x", extra_body=extra)
        assert frontend.fleet.submitted[0].params.top_k == 3
    assert reply.choices[0].token_ids == byte_ids("x")


async def test_models_are_listed_and_found(tmp_path):
    async with client_of(tmp_path, says(byte_ids("x")), names=("org/name",)) as (client, _):
        assert [model.id async for model in client.models.list()] == ["org/name"]
        assert (await client.models.retrieve("org/name")).id == "org/name"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nobody")


async def test_errors_are_of_the_packages_types(tmp_path):
    failures = [Overloaded("full", retry_after_s=7), RequestLost("lost")]

    def fail(prompt, params):
        return [failures[params.seed]]

    async with client_of(tmp_path, fail) as (client, _):

        async def create(**fields):
            await client.chat.completions.create(**{"model": "fake", "messages": HI, **fields})

        with pytest.raises(openai.NotFoundError, match="not served here"):
            await create(model="gpt-4")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await create(messages=[{"role": "user", "content": "x" * 300}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            await create(functions=[{"name": "f"}])
        assert caught.value.param == "functions"
        with pytest.raises(openai.RateLimitError) as caught:
            await create(seed=0)
        assert caught.value.response.headers["retry-after"] == "7"
        with pytest.raises(openai.InternalServerError) as caught:
            await create(seed=1)
        assert caught.value.status_code == 503


async def test_an_error_in_the_middle_of_a_stream_is_raised(tmp_path):
    steps = [Part(token_ids=byte_ids("a")), RequestLost("lost")]
    async with client_of(tmp_path, lambda prompt, params: steps) as (client, _):
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            [chunk async for chunk in stream]


async def test_closing_a_stream_ends_its_generation(tmp_path):
    never = asyncio.Event()
    steps = [Part(token_ids=byte_ids("a")), never]
    async with client_of(tmp_path, lambda prompt, params: steps) as (client, frontend):
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "a":
                break
        await stream.close()
        await until(lambda: not frontend.fleet.running, timeout_s=1.0)


async def test_32_streams_at_once_say_what_whole_answers_say(tmp_path):
    def repeat(prompt, params):
        return parts(prompt, params, byte_ids(f"answer {params.seed} 😀"))

    async with client_of(tmp_path, repeat) as (client, _):

        async def text(seed):
            stream = await client.completions.create(
                model="fake", prompt="x", max_tokens=64, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(text, range(32)))
    assert texts == [f"answer {seed} 😀" for seed in range(32)]
