"""Tool calls in each family's words: what is one, what is not, and what is left of the text."""

from __future__ import annotations

import json
import re

import pytest

from homing.frontend.parsers import Content, ToolCallArguments, ToolCallStart
from homing.frontend.parsers.choose import TOOL_FORMATS
from homing.frontend.parsers.tool_calls import ToolCallParser
from tests.support.answers import ADD, WEATHER, calls, join, parse

PARIS = '{"city": "Paris"}'
ROME = '{"city": "Rome"}'

QWEN_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n"
    "</function>\n</tool_call>"
)


def answer(family: str, text: str, *, parallel: bool = True):
    parser = ToolCallParser(TOOL_FORMATS[family]([WEATHER, ADD]), parallel=parallel)
    return parse(parser, [text])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>\n'),
        ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}'),
        ("hermes", f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}]</tool_call>'),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}'),
        ("llama3_json", f'\n<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]'),
        ("mistral", f'[{{"name": "get_weather", "arguments": {PARIS}}}]'),
        ("mistral", f"[TOOL_CALLS]get_weather{PARIS}"),
        ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}"),
        ("qwen3_coder", QWEN_CALL.format("Paris")),
        ("qwen3_coder", QWEN_CALL.format("Paris").removeprefix("<tool_call>\n")),
        ("qwen3_coder", QWEN_CALL.format("Paris").removesuffix("</tool_call>")),
    ],
)
def test_a_call_is_its_name_and_its_arguments(family, text):
    assert answer(family, text) == calls(("get_weather", PARIS))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "hermes",
            f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>\n'
            f'<tool_call>{{"name": "get_weather", "arguments": {ROME}}}</tool_call>',
        ),
        (
            "hermes",
            f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}, '
            f'{{"name": "get_weather", "arguments": {ROME}}}]</tool_call>',
        ),
        (
            "hermes",
            f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}'
            f'<tool_call>{{"name": "get_weather", "arguments": {ROME}}}',
        ),
        (
            "llama3_json",
            f'{{"name": "get_weather", "parameters": {PARIS}}}; '
            f'{{"name": "get_weather", "parameters": {ROME}}}',
        ),
        (
            "llama3_json",
            f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}\n'
            f'{{"name": "get_weather", "parameters": {ROME}}}',
        ),
        (
            "mistral",
            f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, '
            f'{{"name": "get_weather", "arguments": {ROME}}}]',
        ),
        ("mistral", f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]get_weather{ROME}"),
        ("qwen3_coder", QWEN_CALL.format("Paris") + "\n" + QWEN_CALL.format("Rome")),
    ],
)
def test_several_calls_are_numbered_in_their_order(family, text):
    assert answer(family, text) == calls(("get_weather", PARIS), ("get_weather", ROME))
    assert answer(family, text, parallel=False) == calls(("get_weather", PARIS))


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'),
        ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}'),
        ("mistral", f"[TOOL_CALLS]get_weather{PARIS}"),
        ("qwen3_coder", QWEN_CALL.format("Paris")),
    ],
)
def test_text_before_a_call_is_content_without_the_space_between(family, call):
    assert answer(family, f" Let me look.\n\n{call}\n") == [
        Content(" Let me look."),
        *calls(("get_weather", PARIS)),
    ]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "No call at all.\n"),
        ("hermes", "a <tool_call> is a tag"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"a": nan}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "no"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "a"}, 5]</tool_call>'),
        ("hermes", '<tool_call>{"name": "a"}}</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 100_000),
        ("hermes", '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 9999 + "}" * 9999 + "}"),
        ("llama3_json", '{"name": "Ann", "parameters": {"age": 3}}'),
        ("llama3_json", '{"name": "get_weather"}'),
        ("llama3_json", 'Say {"name": "get_weather", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "; and so on"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[1, 2]"),
        ("mistral", "[TOOL_CALLS]two words{}"),
        ("mistral", "[TOOL_CALLS]get_weather{'city': 1}"),
        ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
        ("qwen3_coder", "<function=f>no parameter</function>"),
        ("qwen3_coder", "<tool_call>text</tool_call>"),
        ("qwen3_coder", "<function=f><parameter=x>1</function>"),
        ("qwen3_coder", "<function=\n>"),
    ],
)
def test_what_is_not_a_call_is_content_to_the_last_character(family, text):
    assert answer(family, text) == [Content(text)]


def test_a_call_behind_one_that_is_broken_is_still_found():
    good = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    assert answer("hermes", f"<tool_call>{{oops}}</tool_call>\n{good}") == [
        Content("<tool_call>{oops}</tool_call>"),
        *calls(("get_weather", PARIS)),
    ]


def test_text_behind_a_call_is_kept():
    good = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    assert answer("hermes", f"A{good}\nB\n") == [
        Content("A"),
        *calls(("get_weather", PARIS)),
        Content("\nB\n"),
    ]


def test_a_closing_tag_inside_a_string_closes_nothing():
    arguments = '{"a": "\\"</tool_call>{\\\\"}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call> <tool_call>'
    assert answer("hermes", text) == [*calls(("add", arguments)), Content(" <tool_call>")]


def test_arguments_keep_the_digits_that_the_model_wrote():
    arguments = '{"a": 1e400,  "b": 123456789012345678901234567890, "c": 1.10}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert answer("hermes", text) == calls(("add", arguments))


@pytest.mark.parametrize("written", ['"{\\"city\\": \\"Paris\\"}"', PARIS])
def test_arguments_written_as_a_string_of_json_are_that_json(written):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>'
    assert answer("hermes", text) == calls(("get_weather", PARIS))


@pytest.mark.parametrize("rest", ["", ', "arguments": null', ', "arguments": {}'])
def test_a_call_without_arguments_has_an_empty_object(rest):
    assert answer("hermes", f'<tool_call>{{"name": "now"{rest}}}') == calls(("now", "{}"))


def test_ids_are_unique_and_fit_for_the_family():
    ids = {
        family: [
            event.id
            for _ in range(2)
            for event in ToolCallParser(TOOL_FORMATS[family]([])).push(text)
            if isinstance(event, ToolCallStart)
        ]
        for family, text in {
            "hermes": '<tool_call>{"name": "f"}</tool_call>',
            "mistral": "[TOOL_CALLS]f{}",
        }.items()
    }
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids["hermes"])
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids["mistral"])
    assert all(len(set(each)) == 2 for each in ids.values())


def test_the_start_is_told_before_the_arguments_and_at_the_closing_tag():
    parser = ToolCallParser(TOOL_FORMATS["hermes"]([]))
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": 1}}') == []
    start, arguments = parser.push("</tool_call>")
    assert isinstance(start, ToolCallStart)
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.fragment) == {"a": 1}


def test_content_is_not_held_back_without_cause():
    parser = ToolCallParser(TOOL_FORMATS["hermes"]([]))
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <") == []
    assert parser.push("b>") == [Content(" <b>")]
    assert join(parser.push("<tool_call>no")) == [Content("<tool_call>no")]


def test_a_long_call_is_read_a_few_times_only(monkeypatch):
    """A megabyte of arguments, four characters at a time: reading it anew each time would take
    hours."""
    tool_format = TOOL_FORMATS["hermes"]([])
    lengths = []

    def read(text, whole):
        lengths.append(len(text))
        return tool_format.read(text, whole)

    counted = type(tool_format)(read, tool_format.openers, tool_format.closers)
    arguments = json.dumps({"code": "x" * 100_000})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    assert parse(ToolCallParser(counted), pieces) == calls(("f", arguments))
    assert sum(length > 512 for length in lengths) <= 2
