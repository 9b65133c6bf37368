"""Chats that go on from the exact tokens of earlier turns."""

from __future__ import annotations

from typing import Any

import pytest

from homing.frontend.turns import exact_prefix, text_behind
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason
from tests.support.byte_model import CHAT_TEMPLATE, EOS, byte_ids
from tests.support.fake_fleet import parts, says
from tests.support.http_frontend import Frontend, serving

URL = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
# Ends turns by the model's own end of sequence, so that the model writes it and the template too.
TEMPLATE = CHAT_TEMPLATE.replace("<|im_end|>", "<|eos|>")
# Forgets what was said before the last user's message, as templates of models that think do.
FORGETTING = "{% for m in messages[-2:] %}[{{ m.content.strip() }}]{% endfor %}<|im_start|>"


def writes_eos(prompt, params):
    """ "hello", in letters that the tokenizer would merge, and the end of the turn."""
    end = Finish(FinishReason.STOP, stop=EOS)
    return parts(prompt, params, [*byte_ids("hello"), EOS], finish=end)


async def two_turns(frontend: Frontend, **fields: Any) -> tuple[list[int], list[int], list[int]]:
    """Prompt and answer of the first turn, and the prompt of the second."""
    body = {"messages": [HI], "return_token_ids": True, "logprobs": True, **fields}
    message = (await frontend.post(URL, body))["choices"][0]["message"]
    await frontend.post(URL, {"messages": [HI, message, MORE]})
    first, second = frontend.fleet.submitted
    return first.prompt, message["generation_token_ids"], second.prompt


async def test_the_next_prompt_begins_with_prompt_and_answer_as_they_were(tmp_path):
    async with serving(tmp_path, writes_eos, chat_template=TEMPLATE) as frontend:
        prompt, answer, second = await two_turns(frontend)
        await frontend.post(
            URL, {"messages": [HI, {"role": "assistant", "content": "hello"}, MORE]}
        )
        encoded_again = frontend.fleet.submitted[-1].prompt
    assert second[: len(prompt) + len(answer)] == [*prompt, *answer]
    assert second != encoded_again, "the tokenizer merges letters that the model wrote apart"
    whole = text_of(tmp_path, second)
    assert whole == text_of(tmp_path, encoded_again)


def text_of(directory, token_ids: list[int]) -> str:
    return Tokenizer.from_dir(directory).decode(token_ids, skip_special_tokens=False)


async def test_a_turn_that_was_cut_off_is_ended_by_the_template(tmp_path):
    async with serving(tmp_path, says(byte_ids("hello")), chat_template=TEMPLATE) as frontend:
        prompt, answer, second = await two_turns(frontend)
    assert second[: len(prompt) + len(answer) + 1] == [*prompt, *answer, EOS]


async def test_a_template_that_forgets_earlier_turns_does_not_matter(tmp_path):
    async with serving(tmp_path, writes_eos, chat_template=FORGETTING) as frontend:
        prompt, answer, second = await two_turns(frontend)
        behind = text_of(tmp_path, second[len(prompt) + len(answer) :])
    assert second[: len(prompt) + len(answer)] == [*prompt, *answer]
    assert behind == "][more]<|im_start|>"


async def test_the_last_message_with_tokens_counts(tmp_path):
    old = {
        "role": "assistant",
        "content": "a",
        "prompt_token_ids": [9],
        "generation_token_ids": [8],
    }
    new = {**old, "prompt_token_ids": [9, 8, 7], "generation_token_ids": [6]}
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post(URL, {"messages": [HI, old, HI, new, MORE]})
        assert frontend.fleet.submitted[-1].prompt[:4] == [9, 8, 7, 6]


async def test_an_answer_with_tool_calls_goes_on_from_its_tokens_too(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tokens = {"prompt_token_ids": [9], "generation_token_ids": [8]}
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call], **tokens},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serving(tmp_path, says(byte_ids("x")), max_context_tokens=4096) as frontend:
        await frontend.post(URL, {"messages": messages, "tools": tools})
        prompt = frontend.fleet.submitted[-1].prompt
        behind = text_of(tmp_path, prompt[2:])
    assert prompt[:2] == [9, 8]
    assert behind.startswith("<|im_end|>\n<|im_start|>tool\n<tool_response>\n42\n")


@pytest.mark.parametrize(
    "tokens",
    [
        {"generation_token_ids": [8]},
        {"prompt_token_ids": [9], "generation_token_ids": "8"},
        {"prompt_token_ids": [9], "generation_token_ids": [True]},
        {"prompt_token_ids": [9], "generation_token_ids": [99999]},
        {"prompt_token_ids": [-1], "generation_token_ids": [8]},
    ],
)
async def test_tokens_that_are_none_are_refused(tmp_path, tokens):
    messages = [HI, {"role": "assistant", "content": "a", **tokens}, MORE]
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.error(URL, {"messages": messages}, 400))["param"] == "messages"


async def test_a_template_that_hides_the_message_is_an_error(tmp_path):
    tokens = {"prompt_token_ids": [9], "generation_token_ids": [8]}
    messages = [HI, {"role": "assistant", "content": "a", **tokens}, MORE]
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    async with serving(tmp_path, says(byte_ids("x")), chat_template=template) as frontend:
        error = await frontend.error(URL, {"messages": messages}, 400)
    assert "cannot go on from its tokens" in error["message"]


def test_only_the_end_of_turn_that_the_model_wrote_is_left_out():
    messages = [HI, {"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": [2]}, HI]
    prefix = exact_prefix(messages)
    assert prefix is not None

    def render(messages):
        return f"x{messages[1]['content']}<end>rest"

    assert text_behind(prefix, messages, render, {2: "<end>"}) == "rest"
    assert text_behind(prefix, messages, render, {2: "<eot>", 3: "<end>"}) == "rest"
    assert text_behind(prefix, messages, render, {5: "<end>"}) == "<end>rest"


@pytest.mark.parametrize("field", ["prompt_token_ids", "input_ids"])
async def test_a_prompt_of_ids_is_taken_instead_of_the_messages(tmp_path, field):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        reply = await frontend.post(URL, {"messages": [HI], field: [7, 8]})
        assert frontend.fleet.submitted[-1].prompt == [7, 8]
        assert reply["choices"][0]["message"]["content"] == "x"
        error = await frontend.error(URL, {"messages": [HI], field: [-7]}, 400)
        assert error["param"] == field
