"""However an answer is cut into pieces, it says the same; and it never raises or loses text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.frontend.parsers import (
    Content,
    Event,
    Reasoning,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    answer_format,
    read_tool_choice,
)
from homing.frontend.parsers.choose import TOOL_FORMATS
from homing.frontend.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser
from homing.frontend.parsers.tool_calls import ToolCallParser
from tests.support.answers import ADD, WEATHER, content, parse

SHARED = [
    "\n",
    " ",
    "\n\n",
    "a",
    "é",
    "text ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ";",
    "<",
    "</",
    ">",
]
CALL = '{"name": "add", "arguments": {"a": 1}}'
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", CALL, '{"name": "add"}', '{"name": "a", "argum'],
    "llama3_json": ["<|python_tag|>", CALL, '{"name": "add", "parameters": {}}', "; "],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "add", '{"a": 1}', f"[{CALL}]", CALL],
    "qwen3_coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=add>",
        "<function=",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<parameter=a>\n1\n</parameter>",
    ],
}
ARRAY = [
    '[{"name": "f", "arguments": ',
    "{}",
    '{"a": "\\"}"}',
    "}]",
    '}, {"name": "g", "arguments": ',
    '"arguments": ',
]
THINKING = ["<think>", "</think>", "[THINK]", "[/THINK]"]


def texts(fragments: list[str]) -> st.SearchStrategy[str]:
    fragment = st.sampled_from(fragments * 3 + SHARED) | st.text(max_size=3)
    return st.lists(fragment, max_size=14).map("".join)


@st.composite
def cut(draw, text: st.SearchStrategy[str]) -> list[str]:
    whole = draw(text)
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=30).map(sorted))
    ends = [0, *cuts, len(whole)]
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
@settings(max_examples=150)
@given(data=st.data())
def test_any_split_finds_the_same_calls(family, data):
    pieces = data.draw(cut(texts(FRAGMENTS[family])))
    text = "".join(pieces)
    tool_format = TOOL_FORMATS[family]([WEATHER, ADD])
    events = parse(ToolCallParser(tool_format), [text])
    assert parse(ToolCallParser(tool_format), pieces) == events
    assert parse(ToolCallParser(tool_format), text) == events
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert content(events) == text
    for event in events:
        if isinstance(event, ToolCallArguments):
            assert isinstance(json.loads(event.fragment), dict)


@pytest.mark.parametrize("family", sorted(REASONING_FORMATS))
@pytest.mark.parametrize("prompt_end", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@settings(max_examples=60)
@given(pieces=cut(texts(THINKING)))
def test_any_split_finds_the_same_thoughts(family, prompt_end, pieces):
    def parser():
        return ReasoningParser(REASONING_FORMATS[family], prompt_end=prompt_end)

    text = "".join(pieces)
    expected = split_at_marks(text, REASONING_FORMATS[family], prompt_end)
    assert parse(parser(), pieces) == expected
    assert parse(parser(), text) == expected


def split_at_marks(text: str, form: ReasoningFormat, prompt_end: str) -> list[Event]:
    """What a reader would do who has the whole text."""
    body = text.lstrip()
    if body.startswith(form.opener):
        body = body.removeprefix(form.opener)
    elif not form.starts_open(prompt_end):
        return [Content(text)] if text else []
    else:
        body = text
    thoughts, closer, answer = body.partition(form.closer)
    thoughts = thoughts.strip("\n") if closer else thoughts.lstrip("\n")
    answer = answer.lstrip("\n")
    return [event for event in (Reasoning(thoughts), Content(answer)) if event.text]


@settings(max_examples=150)
@given(pieces=cut(texts(THINKING[:2] + FRAGMENTS["hermes"])))
def test_any_split_of_thoughts_and_calls_together_says_the_same(pieces):
    form = answer_format(None, tool_call_parser="hermes", reasoning_parser="qwen3")
    choice = read_tool_choice("auto", [WEATHER, ADD])
    assert parse(form.parser(choice), pieces) == parse(form.parser(choice), ["".join(pieces)])


@settings(max_examples=150)
@given(pieces=cut(texts(ARRAY)))
def test_any_split_of_a_constrained_answer_says_the_same(pieces):
    choice = read_tool_choice("required", [Tool("f", {})])
    form = answer_format(None)
    events = parse(form.parser(choice), ["".join(pieces)])
    assert parse(form.parser(choice), pieces) == events
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert content(events) == "".join(pieces)
