"""The openai package against a frontend, as users have it: typed replies, typed errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from homing.client import Part
from homing.errors import Overloaded, RequestLost
from homing.frontend.access import AccessSettings
from homing.wire import Finish, FinishReason
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import log_prob_of, parts, says
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


async def test_a_completion_of_token_ids_is_scored_with_its_prompt(tmp_path):
    """As evaluations have it: the prompt's log-probabilities come with the answer's."""
    prompts = [byte_ids("né"), byte_ids("x")]
    async with client_of(tmp_path, says(byte_ids("yo"))) as (client, frontend):
        reply = await client.completions.create(
            model="fake", prompt=prompts, echo=True, logprobs=2, max_tokens=1
        )
        assert [generation.prompt for generation in frontend.fleet.submitted] == prompts
    assert [choice.text for choice in reply.choices] == ["néy", "xy"]
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        scores = choice.logprobs
        expected = [log_prob_of(token_id) for token_id in [*prompt[1:], *byte_ids("y")]]
        assert scores.token_logprobs == [None, *map(pytest.approx, expected)]
        assert scores.top_logprobs[0] is None
        assert all(len(top) == 2 for top in scores.top_logprobs[1:])
        assert len(scores.tokens) == len(scores.text_offset) == len(prompt) + 1
    assert reply.usage.prompt_tokens == 4


async def test_tools_are_called_whole_and_streamed(tmp_path):
    text = 'Let me see. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    template = "{{ '<tool_call>' if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with client_of(tmp_path, says(byte_ids(text)), chat_template=template) as (client, _):
        tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
        arguments = {"model": "fake", "messages": HI, "tools": tools}
        reply = await client.chat.completions.create(**arguments)
        async with client.chat.completions.stream(**arguments) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    for completion in (reply, final):
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "Let me see."
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
        assert call.id
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["f"]


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


async def test_a_client_that_may_retry_waits_and_gets_its_answer(tmp_path):
    refusals = iter([Overloaded("full", retry_after_s=1), RequestLost("lost")])

    def at_last(prompt, params):
        refusal = next(refusals, None)
        return [refusal] if refusal else parts(prompt, params, byte_ids("yo"))

    async with client_of(tmp_path, at_last) as (client, frontend):
        patient = client.with_options(max_retries=2)
        reply = await patient.chat.completions.create(model="fake", messages=HI)
        assert len(frontend.fleet.submitted) == 3
    assert reply.choices[0].message.content == "yo"


async def test_a_wrong_key_is_an_authentication_error(tmp_path):
    access = AccessSettings(api_keys=("right",))
    async with client_of(tmp_path, says(byte_ids("yo")), access=access) as (client, _):
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="fake", messages=HI)
        assert caught.value.code == "invalid_api_key"
        known = client.with_options(api_key="right")
        assert (await known.chat.completions.create(model="fake", messages=HI)).choices


async def test_what_is_not_served_is_not_found(tmp_path):
    async with client_of(tmp_path, says(byte_ids("yo"))) as (client, _):
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="fake", input="hi")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="fake", input="hi")


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
