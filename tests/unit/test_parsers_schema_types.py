"""Qwen3-Coder's plain text becomes the JSON that the tool's schema asks for."""

from __future__ import annotations

import json

import pytest

from homing.frontend.parsers import Tool, ToolCallArguments
from homing.frontend.parsers.qwen3_coder import qwen3_coder
from homing.frontend.parsers.tool_calls import ToolCallParser
from tests.support.answers import parse


def arguments(schema: dict, written: str, **definitions: dict) -> object:
    tool = Tool("f", {"type": "object", "properties": {"x": schema}, **definitions})
    text = f"<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>"
    *_, event = parse(ToolCallParser(qwen3_coder([tool])), [text])
    assert isinstance(event, ToolCallArguments)
    return json.loads(event.fragment)["x"]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, " two\nlines\n", " two\nlines\n"),
        ({"type": "string"}, "</parameter> in code", "</parameter> in code"),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "-5", -5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "1_000", "1_000"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "5.5e3", 5500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, "[1,\n 2]", [1, 2]),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "05", "05"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[]", []),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "true", True),
        ({"enum": ["a", 1, None]}, "1", 1),
        ({"enum": ["a", 1, None]}, "a", "a"),
        ({"const": 2.5}, "2.5", 2.5),
        ({}, "5", "5"),
        ({"type": 7, "anyOf": 7, "enum": 7}, "5", "5"),
    ],
)
def test_a_value_is_what_the_schema_allows_and_else_a_string(schema, written, value):
    assert arguments(schema, written) == value


def test_references_are_followed():
    definitions = {"$defs": {"A/~": {"$ref": "#/$defs/N"}, "N": {"type": "integer"}}}
    assert arguments({"$ref": "#/$defs/A~1~0"}, "5", **definitions) == 5


@pytest.mark.parametrize("target", ["#/properties/x", "#/nowhere", "https://example.com/schema"])
def test_references_to_themselves_or_to_nothing_allow_strings(target):
    assert arguments({"$ref": target}, "5") == "5"


def test_a_function_that_was_not_offered_gets_strings():
    text = "<function=g><parameter=n>5</parameter><parameter=n>6</parameter></function>"
    *_, event = parse(ToolCallParser(qwen3_coder([])), [text])
    assert event == ToolCallArguments(0, '{"n": "6"}')
