"""The grammar of an answer that may call tools: what it lets through, and how that is read."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from homing.engine.structured.vocabulary import byte_vocabulary
from homing.frontend.parsers import (
    Content,
    Tool,
    ToolCallStart,
    answer_format,
    answer_or_calls,
    read_tool_choice,
)

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Bern", "start: x ::= // \\ '\"é"]}},
    }
)
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [Tool("plan", DAYS), Tool("rest", {"type": "object"})]

HERMES = {
    "one": '<tool_call>\n{"name": "plan", "arguments": {"days": 3}}\n</tool_call>',
    "bad": '<tool_call>\n{"name": "plan", "arguments": {"nights": 3}}\n</tool_call>',
    "two": '<tool_call>{"name": "plan", "arguments": {"days": 3}}</tool_call>\n'
    '<tool_call>{"name": "rest", "arguments": {"x": "é"}}</tool_call>',
}
LLAMA = {
    "one": '{"name": "plan", "parameters": {"days": 3}}',
    "bad": '{"name": "fly", "parameters": {"days": 3}}',
    "two": '{"name": "plan", "parameters": {"days": 3}}; '
    '{"name": "rest", "parameters": {"x": "é"}}',
}
FORMATS = pytest.mark.parametrize(
    ("tool_format", "calls"), [("hermes", HERMES), ("llama3_json", LLAMA)]
)


def accepts(grammar: str, text: str) -> bool:
    """Whether the text is a sentence of the grammar."""
    vocabulary = byte_vocabulary()
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error()
    tokens = vocabulary.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and (
        matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


@FORMATS
def test_an_answer_fits_its_shape_or_is_calls_that_fit_theirs(tool_format, calls):
    grammar = answer_or_calls(SCHEMA, read_tool_choice("auto", TOOLS), tool_format)
    assert grammar is not None
    assert accepts(grammar, '{"city": "Bern"}')
    assert accepts(grammar, json.dumps({"city": "start: x ::= // \\ '\"é"}, ensure_ascii=False))
    assert accepts(grammar, calls["one"])
    assert accepts(grammar, calls["two"])
    for other in ('{"city": "Oslo"}', "Bern", calls["bad"], calls["one"] + '{"city": "Bern"}'):
        assert not accepts(grammar, other)


@FORMATS
def test_one_call_at_most_where_calls_are_not_parallel(tool_format, calls):
    choice = read_tool_choice("auto", TOOLS, parallel=False)
    grammar = answer_or_calls(SCHEMA, choice, tool_format)
    assert grammar is not None
    assert accepts(grammar, calls["one"])
    assert not accepts(grammar, calls["two"])


@FORMATS
def test_the_formats_parser_reads_what_the_grammar_lets_through(tool_format, calls):
    known = answer_format(None, tool_call_parser=tool_format)

    def read(text: str) -> tuple[str, list[str]]:
        parser = known.parser(read_tool_choice("auto", TOOLS))
        events = [*parser.push(text), *parser.finish()]
        content = "".join(event.text for event in events if isinstance(event, Content))
        return content, [event.name for event in events if isinstance(event, ToolCallStart)]

    assert read('{"city": "Bern"}') == ('{"city": "Bern"}', [])
    assert read(calls["two"]) == ("", ["plan", "rest"])


@pytest.mark.parametrize("tool_format", ["mistral", "qwen3_coder", None])
def test_other_formats_have_no_such_grammar(tool_format):
    assert answer_or_calls(SCHEMA, read_tool_choice("auto", TOOLS), tool_format) is None
