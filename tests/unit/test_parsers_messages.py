"""Messages in OpenAI's shapes: those that go out, and those that come back with the next turn."""

from __future__ import annotations

import copy
import json

from homing.frontend.parsers import (
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    answer_format,
    delta,
    message,
    read_tool_choice,
    template_messages,
)
from tests.support.answers import WEATHER, parse

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_streamed_call_starts_with_its_name_and_empty_arguments():
    """Clients append what follows (llama.cpp#22722, req_llm#801)."""
    form = answer_format(None, tool_call_parser="hermes")
    parser = form.parser(read_tool_choice(None, [WEATHER]))
    deltas = [delta(event) for piece in CALL for event in parser.push(piece)]
    first, *rest = [each["tool_calls"][0] for each in deltas]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert all(each["index"] == 0 and set(each) == {"index", "function"} for each in rest)
    arguments = "".join(each["function"]["arguments"] for each in rest)
    assert json.loads(arguments) == {"city": "Paris"}


def test_each_kind_of_text_has_its_field():
    assert delta(Content("a")) == {"content": "a"}
    assert delta(Reasoning("a")) == {"reasoning_content": "a", "reasoning": "a"}


def test_the_whole_message_is_the_deltas_joined():
    events = [
        Reasoning("Hm"),
        Reasoning("."),
        ToolCallStart(0, "a", "f"),
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, "}"),
        ToolCallStart(1, "b", "g"),
        ToolCallArguments(1, "{}"),
    ]
    assert message(events) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_a_message_without_calls_has_no_list_of_them():
    """An empty list reads as a call to some clients (vllm#53255, sglang#2877)."""
    assert message([Content("Hel"), Content("lo")]) == {"role": "assistant", "content": "Hello"}
    assert message([]) == {"role": "assistant", "content": ""}


def test_templates_get_arguments_as_mappings_and_content_as_text():
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": '{"a": [1.5, null]}'}},
                {"id": "2", "function": {"name": "g", "arguments": ""}},
                {"id": "3", "function": {"name": "h", "arguments": "{oops"}},
                {"id": "4", "function": {"name": "i", "arguments": {"b": 2}}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "{}"},
        {"role": "assistant", "content": "Rain."},
    ]
    before = copy.deepcopy(messages)
    user, assistant, *rest = template_messages(messages)
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "Hm."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"a": [1.5, None]},
        {},
        "{oops",
        {"b": 2},
    ]
    assert [user, *rest] == [before[0], *before[2:]]
    assert messages == before


def test_odd_tool_calls_reach_the_template_as_they_are():
    odd = {"role": "assistant", "content": "", "tool_calls": [5, {}, {"function": 5}]}
    assert template_messages([odd]) == [odd]


def test_what_a_model_called_comes_back_as_what_it_wrote():
    """The answer, parsed and sent back with the next turn, renders to the same text: that is what
    lets the next turn find its prefix in the cache."""
    form = answer_format(None, tool_call_parser="hermes")
    answer = message(parse(form.parser(read_tool_choice(None, [WEATHER])), [CALL]))
    (rendered,) = template_messages([answer])
    call = rendered["tool_calls"][0]["function"]
    written = json.dumps({"name": call["name"], "arguments": call["arguments"]})
    assert f"<tool_call>\n{written}\n</tool_call>" == CALL
