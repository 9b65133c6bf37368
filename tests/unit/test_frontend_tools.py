"""Tools in /v1/chat/completions: what the model is told, and what of its answer is a call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homing.params import Grammar, JsonSchema
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason
from tests.support.byte_model import CHAT_TEMPLATE, byte_ids
from tests.support.fake_fleet import parts, says
from tests.support.http_frontend import Frontend, serving

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ tools | tojson if tools else '' }}" + CHAT_TEMPLATE
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>{"name": "sub", "arguments": {"a": 2}}</tool_call>'
REQUIRED = '[{"name":"add","arguments":{"a":1}},{"name":"sub","arguments":{"a":2}}]'


def tools_frontend(tmp_path, answer: str, template: str | None = TEMPLATE, **options: Any):
    options = {"model_settings": {"tool_call_parser": "hermes"}} | options
    return serving(
        tmp_path, says(byte_ids(answer)), chat_template=template, max_context_tokens=4096, **options
    )


async def ask(frontend: Frontend, **fields: Any) -> dict[str, Any]:
    """The only choice of the reply, ids of calls replaced by "id"."""
    body = {"messages": HI, "tools": [ADD, SUB], **fields}
    [choice] = (await frontend.post(URL, body))["choices"]
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id")
    return choice


async def ask_streamed(frontend: Frontend, **fields: Any) -> list[dict[str, Any]]:
    """The choices of all chunks behind the opening one."""
    body = {"messages": HI, "tools": [ADD, SUB], **fields}
    return [chunk["choices"][0] for chunk in (await frontend.stream(URL, body))[1:]]


def prompt_of(frontend: Frontend) -> str:
    card = frontend.fleet.fleet.card
    assert card is not None
    return Tokenizer.from_dir(card.tokenizer_dir).decode(frontend.fleet.submitted[-1].prompt)


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_call_in_the_models_own_format_is_a_tool_call(tmp_path):
    async with tools_frontend(tmp_path, f"ok {CALL}") as frontend:
        choice = await ask(frontend)
    assert choice["message"]["content"] == "ok"
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]
    assert choice["finish_reason"] == "tool_calls"


async def test_an_answer_in_text_has_no_calls_though_tools_were_given(tmp_path):
    async with tools_frontend(tmp_path, "no call") as frontend:
        choice = await ask(frontend)
    assert choice["message"] == {"role": "assistant", "content": "no call", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_an_answer_that_is_all_calls_has_null_for_content(tmp_path):
    async with tools_frontend(tmp_path, TWO_CALLS) as frontend:
        choice = await ask(frontend)
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}'), call("sub", '{"a": 2}')]


@pytest.mark.parametrize(
    ("answer", "fields"),
    [(TWO_CALLS, {}), (REQUIRED, {"tool_choice": "required"})],
    ids=["auto", "required"],
)
async def test_a_streamed_call_begins_with_its_name_and_goes_on_with_arguments(
    tmp_path, answer, fields
):
    async with tools_frontend(tmp_path, answer) as frontend:
        choices = await ask_streamed(frontend, **fields)
        whole = await ask(frontend, **fields)
    deltas = [c["delta"]["tool_calls"][0] for c in choices if "tool_calls" in c["delta"]]
    arguments: dict[int, str] = {}
    for delta in deltas:
        if delta["index"] not in arguments:
            assert delta["id"]
            assert delta["type"] == "function"
            assert delta["function"]["name"] == ("add", "sub")[delta["index"]]
            assert delta["function"]["arguments"] == ""
            arguments[delta["index"]] = ""
        else:
            assert delta.keys() == {"index", "function"}
            assert delta["function"].keys() == {"arguments"}
            arguments[delta["index"]] += delta["function"]["arguments"]
    assert [json.loads(text) for text in arguments.values()] == [{"a": 1}, {"a": 2}]
    assert [c["function"]["arguments"] for c in whole["message"]["tool_calls"]] == [
        *arguments.values()
    ]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert not any(choice["delta"].get("content") for choice in choices)


async def test_text_before_a_call_is_streamed_and_the_call_is_not_part_of_it(tmp_path):
    async with tools_frontend(tmp_path, f"ok {CALL}") as frontend:
        choices = await ask_streamed(frontend)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "ok"
    empty = [c for c in choices if not c["delta"] and not c["finish_reason"]]
    assert not empty


async def test_tokens_behind_a_streamed_call_are_told_once_each(tmp_path):
    async with tools_frontend(tmp_path, f"ok {CALL}") as frontend:
        choices = await ask_streamed(frontend, return_token_ids=True, logprobs=True)
    assert [t for c in choices for t in c.get("token_ids", [])] == byte_ids(f"ok {CALL}")
    scored = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert len(scored) == len(f"ok {CALL}")


async def test_calls_are_not_looked_for_when_none_is_allowed_and_tools_are_not_told(tmp_path):
    async with tools_frontend(tmp_path, CALL) as frontend:
        choice = await ask(frontend, tool_choice="none")
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert "add" not in prompt_of(frontend)
        await ask(frontend)
        assert '"name": "add"' in prompt_of(frontend)


async def test_without_parallel_calls_the_first_one_alone_is_told(tmp_path):
    async with tools_frontend(tmp_path, TWO_CALLS) as frontend:
        choice = await ask(frontend, parallel_tool_calls=False)
        assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]


async def test_required_calls_are_held_to_the_schemas_of_their_tools(tmp_path):
    async with tools_frontend(tmp_path, REQUIRED) as frontend:
        choice = await ask(frontend, tool_choice="required")
        shape = frontend.fleet.submitted[-1].params.structured_output
        await ask(frontend, tool_choice="required", parallel_tool_calls=False)
        single = frontend.fleet.submitted[-1].params.structured_output
    assert choice["message"]["tool_calls"] == [call("add", '{"a":1}'), call("sub", '{"a":2}')]
    assert isinstance(shape, JsonSchema)
    assert json.loads(shape.schema)["$defs"]["add"] == PARAMETERS
    assert isinstance(single, JsonSchema)
    assert json.loads(single.schema)["maxItems"] == 1


async def test_a_named_call_is_its_arguments_and_finishes_with_stop(tmp_path):
    async with tools_frontend(tmp_path, '{"a":1}') as frontend:
        choice = await ask(frontend, tool_choice=NAMED)
        choices = await ask_streamed(frontend, tool_choice=NAMED)
        shape = frontend.fleet.submitted[-1].params.structured_output
    assert choice["message"]["tool_calls"] == [call("add", '{"a":1}')]
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "stop"
    assert isinstance(shape, JsonSchema)
    assert json.loads(shape.schema) == PARAMETERS
    deltas = [delta for c in choices for delta in c["delta"].get("tool_calls", [])]
    assert deltas[0]["function"] == {"name": "add", "arguments": ""}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"a":1}'


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED], ids=["auto", "any", "named"])
async def test_an_answer_cut_off_at_the_limit_says_length_whatever_it_calls(tmp_path, tool_choice):
    answer = {"auto": CALL, "required": REQUIRED}.get(str(tool_choice), '{"a":1}')

    def cut(prompt, params):
        return parts(prompt, params, byte_ids(answer), finish=Finish(FinishReason.LENGTH))

    async with serving(
        tmp_path, cut, model_settings={"tool_call_parser": "hermes"}, max_context_tokens=4096
    ) as frontend:
        choice = await ask(frontend, tool_choice=tool_choice)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools[1]"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"guided_regex": "a"}, "tool_choice"),
    ],
)
async def test_tools_that_cannot_be_are_refused_by_name(tmp_path, fields, param):
    async with tools_frontend(tmp_path, "x") as frontend:
        error = await frontend.error(URL, {"messages": HI, "tools": [ADD, SUB], **fields}, 400)
    assert error["param"] == param


SHAPED = {"response_format": {"type": "json_object"}}


async def test_an_answer_of_a_shape_may_have_tools_that_it_does_not_call(tmp_path):
    async with tools_frontend(tmp_path, "{}") as frontend:
        for choice in ("none", "auto"):
            answer = await ask(frontend, **SHAPED, tool_choice=choice)
            assert answer["message"]["content"] == "{}"
            assert answer["finish_reason"] == "stop"
        shapes = [g.params.structured_output for g in frontend.fleet.submitted]
    assert isinstance(shapes[0], JsonSchema)
    assert isinstance(shapes[1], Grammar)  # it could have called


async def test_a_model_may_call_a_tool_instead_of_an_answer_of_a_shape(tmp_path):
    async with tools_frontend(tmp_path, CALL) as frontend:
        choice = await ask(frontend, **SHAPED)
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]
    assert choice["finish_reason"] == "tool_calls"


async def test_a_required_call_leaves_no_text_to_have_a_shape(tmp_path):
    async with tools_frontend(tmp_path, REQUIRED) as frontend:
        choice = await ask(frontend, **SHAPED, tool_choice="required")
        shape = frontend.fleet.submitted[-1].params.structured_output
    assert choice["message"]["tool_calls"]
    assert isinstance(shape, JsonSchema)
    assert json.loads(shape.schema)["type"] == "array"


async def test_a_format_without_a_grammar_has_either_tools_or_a_shape(tmp_path):
    settings = {"tool_call_parser": "qwen3_coder"}
    async with tools_frontend(tmp_path, "{}", model_settings=settings) as frontend:
        error = await frontend.error(URL, {"messages": HI, "tools": [ADD], **SHAPED}, 400)
    assert error["param"] == "tool_choice"


async def test_a_template_without_tools_has_them_told_in_a_system_message(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **call("add", "{}")}]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ]
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    async with tools_frontend(tmp_path, CALL, template=template, model_settings={}) as frontend:
        choice = await ask(frontend, messages=messages)
        prompt = prompt_of(frontend)
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]
    assert prompt.startswith("[system:Be brief.\n\nYou may call functions")
    assert json.dumps(ADD) in prompt
    assert '[assistant:<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>]' in prompt
    assert prompt.endswith("[tool:<tool_response>\n9\n</tool_response>]")


async def test_a_format_of_special_tokens_keeps_them_in_the_text_that_is_parsed(tmp_path):
    mark = "[TOOL_CALLS]"
    answer = f'{mark}[{{"name": "add", "arguments": {{"a": 1}}}}]'
    async with tools_frontend(
        tmp_path, answer, model_settings={"tool_call_parser": "mistral"}
    ) as frontend:
        choice = await ask(frontend)
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]
