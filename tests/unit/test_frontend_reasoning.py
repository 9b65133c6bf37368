"""Reasoning in /v1/chat/completions: thoughts apart from the answer, and switches for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from homing.params import SamplingParams
from tests.support.byte_model import CHAT_TEMPLATE, IM_END, byte_id, byte_ids
from tests.support.fake_fleet import LENGTH, STOP, Script, Step, parts, says
from tests.support.http_frontend import Frontend, serving, until

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
THOUGHTS = "<think>\nlet me see\n</think>\n\nyes"
OPENS_THOUGHTS = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
SWITCHES = "{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}<think></think>"


def thinking(tmp_path, answer: str = THOUGHTS, **options: Any):
    options = {"model_settings": {"reasoning_parser": "qwen3"}} | options
    return serving(tmp_path, says(byte_ids(answer)), **options)


async def ask(frontend: Frontend, **fields: Any) -> dict[str, Any]:
    return await frontend.post(URL, {"messages": HI, **fields})


def joined(choices: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name, "") for choice in choices)


async def test_thoughts_are_apart_from_the_answer_by_both_names(tmp_path):
    async with thinking(tmp_path) as frontend:
        body = await ask(frontend)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "reasoning_content": "let me see",
        "reasoning": "let me see",
    }
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_streamed_thoughts_equal_those_of_a_whole_answer(tmp_path):
    async with thinking(tmp_path) as frontend:
        body = {"messages": HI, "stream_options": {"include_usage": True}}
        *chunks, usage = await frontend.stream(URL, body)
        whole = await ask(frontend)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert joined(choices, "reasoning_content") == joined(choices, "reasoning") == "let me see"
    assert joined(choices, "content") == "yes"
    assert usage["usage"] == whole["usage"]


async def test_tokens_of_thoughts_are_counted_and_part_of_the_total(tmp_path):
    async with thinking(tmp_path) as frontend:
        usage = (await ask(frontend))["usage"]
    assert usage["completion_tokens"] == len(THOUGHTS)
    thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len("let me see") <= thoughts <= len("\nlet me see\n</think>")


async def test_thoughts_that_the_prompt_opens_are_thoughts(tmp_path):
    async with thinking(
        tmp_path, "hm</think>yes", chat_template=OPENS_THOUGHTS, model_settings={}
    ) as frontend:
        message = (await ask(frontend))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "yes")


async def test_without_a_parser_the_marks_are_content(tmp_path):
    async with thinking(tmp_path, model_settings={"reasoning_parser": "none"}) as frontend:
        message = (await ask(frontend))["choices"][0]["message"]
    assert message["content"] == THOUGHTS
    assert "reasoning" not in message


async def test_a_request_may_have_thoughts_left_in_place_or_left_out(tmp_path):
    async with thinking(tmp_path) as frontend:
        in_place = await ask(frontend, separate_reasoning=False)
        left_out = await ask(frontend, include_reasoning=False)
        chunks = await frontend.stream(URL, {"messages": HI, "include_reasoning": False})
    assert in_place["choices"][0]["message"]["content"] == THOUGHTS
    assert "reasoning" not in left_out["choices"][0]["message"]
    assert left_out["choices"][0]["message"]["content"] == "yes"
    assert left_out["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert all("reasoning" not in chunk["choices"][0]["delta"] for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "||"),
        ({"reasoning_effort": "high"}, "||high"),
        ({"reasoning_effort": "none"}, "False|False|none"),
        ({"enable_thinking": True}, "True|True|"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "False||"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "True|True|none"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "True|False|none",
        ),
        ({"response_format": {"type": "json_object"}}, "False|False|"),
    ],
)
async def test_switches_reach_the_template(tmp_path, fields, told):
    async with thinking(tmp_path, chat_template=SWITCHES) as frontend:
        await ask(frontend, **fields)
        prompt = frontend.fleet.submitted[-1].prompt
    text = bytes(token - byte_id(0) for token in prompt).decode()
    assert text == f"{told}<think></think>"


async def test_an_answer_of_a_given_shape_is_all_content(tmp_path):
    options: dict[str, Any] = {"model_settings": {"reasoning_parser": "deepseek_r1"}}
    async with thinking(tmp_path, '{"a":1}', **options) as frontend:
        body = await ask(frontend, response_format={"type": "json_object"})
    assert body["choices"][0]["message"]["content"] == '{"a":1}'


async def test_special_tokens_are_part_of_the_text_on_request(tmp_path):
    answer = [*byte_ids("a"), IM_END, *byte_ids("b")]
    async with serving(tmp_path, says(answer)) as frontend:
        plain = await frontend.post("/v1/completions", {"prompt": "x"})
        fields = {"prompt": "x", "skip_special_tokens": False}
        special = await frontend.post("/v1/completions", fields)
        chat = await ask(frontend, skip_special_tokens=False)
    assert plain["choices"][0]["text"] == "ab"
    assert special["choices"][0]["text"] == "a<|im_end|>b"
    assert chat["choices"][0]["message"]["content"] == "a<|im_end|>b"


def says_resumably(whole: str, then: str = "") -> Script:
    """A model that says `whole`, also from the middle of it on; or `then`, once it was made to end
    its thoughts."""
    first_prompt: list[int] = []

    def script(prompt: list[int], params: SamplingParams) -> Iterable[Step]:
        if not first_prompt:
            first_prompt.extend(prompt)
        generated = prompt[len(first_prompt) :]
        was_closed = generated != byte_ids(whole)[: len(generated)]
        rest = byte_ids(then) if was_closed else byte_ids(whole)[len(generated) :]
        limit = params.num_tokens_to_generate
        room = len(rest) if limit is None else limit - len(generated)
        end = LENGTH if room < len(rest) else STOP
        limited = msgspec.structs.replace(params, num_tokens_to_generate=None)
        return parts(prompt, limited, rest[:room], finish=end, num_cached_tokens=3)

    return script


def budgeted(tmp_path, script: Script) -> Any:
    settings = {"reasoning_parser": "qwen3"}
    return serving(tmp_path, script, model_settings=settings, max_context_tokens=1000)


async def test_thoughts_beyond_the_budget_are_ended_and_the_answer_follows(tmp_path):
    script = says_resumably("<think>" + "hm " * 99, then="yes")
    fields = {"thinking_token_budget": 20, "seed": 5}
    async with budgeted(tmp_path, script) as frontend:
        body = await ask(frontend, **fields)
        first, second = frontend.fleet.submitted
    message = body["choices"][0]["message"]
    assert message["reasoning"] == ("hm " * 99)[: 20 - len("<think>")]
    assert message["content"] == "yes"
    closer = byte_ids("\n</think>\n\n")
    assert second.prompt == [*first.prompt, *byte_ids("<think>" + "hm " * 99)[:20], *closer]
    assert second.num_resumed_tokens == 20 + len(closer)
    assert first.params.seed == second.params.seed == 5
    assert body["usage"]["completion_tokens"] == 20 + len(closer) + len("yes")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_thoughts_that_end_within_the_budget_do_not_notice_it(tmp_path):
    whole = "<think>a</think>" + "well " * 20
    async with budgeted(tmp_path, says_resumably(whole)) as frontend:
        plain = await ask(frontend)
    async with budgeted(tmp_path, says_resumably(whole)) as frontend:
        limited = await ask(frontend, thinking_token_budget=20, logprobs=True)
        chunks = await frontend.stream(URL, {"messages": HI, "thinking_token_budget": 20})
        assert len(frontend.fleet.submitted) == 4
    assert limited["choices"][0]["message"] == plain["choices"][0]["message"]
    assert len(limited["choices"][0]["logprobs"]["content"]) == len(whole)
    assert joined([chunk["choices"][0] for chunk in chunks], "content") == "well " * 20
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 20}, {"response_format": {"type": "json_object"}}]
)
async def test_a_budget_that_is_never_reached_is_no_second_generation(tmp_path, fields):
    async with budgeted(tmp_path, says_resumably("{}")) as frontend:
        await ask(frontend, thinking_token_budget=19, **fields)
        assert len(frontend.fleet.submitted) == 1


async def test_a_client_that_leaves_ends_the_second_part_too(tmp_path):
    never = asyncio.Event()

    def answers(prompt: list[int], params: SamplingParams) -> Iterable[Step]:
        if params.num_tokens_to_generate == 5:
            return parts(prompt, params, byte_ids("<think>"))
        return [never]

    async with budgeted(tmp_path, answers) as frontend:
        body = {"messages": HI, "thinking_token_budget": 5}
        asking = asyncio.create_task(frontend.http.post(URL, json=body))
        await until(lambda: len(frontend.fleet.submitted) == 2)
        asking.cancel()
        await until(lambda: not frontend.fleet.running)


async def test_a_budget_without_sense_is_refused(tmp_path):
    budget = {"messages": HI, "thinking_token_budget": 0}
    async with budgeted(tmp_path, says_resumably("x")) as frontend:
        assert (await frontend.error(URL, budget, 400))["param"] == "thinking_token_budget"
    async with serving(tmp_path, says_resumably("x")) as frontend:
        budget["thinking_token_budget"] = 5
        assert "--reasoning-parser" in (await frontend.error(URL, budget, 400))["message"]
