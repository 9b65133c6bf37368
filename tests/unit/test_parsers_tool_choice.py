"""What a request lets the model call: validated, as a schema, and read back."""

from __future__ import annotations

import json

import pytest

from homing.errors import InvalidRequest
from homing.frontend.parsers import (
    Content,
    Tool,
    ToolCallArguments,
    answer_format,
    read_tool_choice,
    read_tools,
)
from tests.support.answers import ADD, WEATHER, calls, join, parse

NAMED = {"type": "function", "function": {"name": "add"}}


def openai(name: str, parameters: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_tools_have_a_name_and_a_schema():
    tools = read_tools([openai("f", {"type": "object"}), openai("g")])
    assert tools[0] == Tool("f", {"type": "object"})
    assert tools[1].parameters["additionalProperties"] is False
    assert read_tools(None) == []


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([5], "tools[0]"),
        ([{"type": "function"}], "tools[0]"),
        ([{"type": "web_search", "function": {"name": "f"}}], "tools[0]"),
        ([openai("f"), openai("f")], "tools[1]"),
        ([openai("")], "tools[0].function.name"),
        ([openai("a b")], "tools[0].function.name"),
        ([openai("f", [])], "tools[0].function.parameters"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_tool_is_refused_with_the_field_at_fault(tools, field):
    with pytest.raises(InvalidRequest) as refusal:
        read_tools(tools)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (NAMED, "named"),
    ],
)
def test_the_choices_have_modes(value, mode):
    assert read_tool_choice(value, [WEATHER, ADD]).mode == mode


def test_without_tools_nothing_is_called():
    assert read_tool_choice(None, []).mode == "none"
    parser = answer_format("<tool_call>").parser(read_tool_choice("auto", []))
    assert parse(parser, ['<tool_call>{"name": "f"}</tool_call>']) == [
        Content('<tool_call>{"name": "f"}</tool_call>')
    ]


@pytest.mark.parametrize(
    ("value", "tools"),
    [
        ("required", []),
        ("any", [ADD]),
        (5, [ADD]),
        ({"type": "function", "function": {"name": "sub"}}, [ADD]),
        ({"type": "function", "function": "add"}, [ADD]),
        ({"type": "custom", "function": {"name": "add"}}, [ADD]),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(value, tools):
    with pytest.raises(InvalidRequest) as refusal:
        read_tool_choice(value, tools)
    assert refusal.value.field == "tool_choice"


def test_only_required_and_named_calls_constrain_the_answer():
    assert read_tool_choice("auto", [ADD]).output_schema is None
    assert read_tool_choice("none", [ADD]).output_schema is None
    assert read_tool_choice(NAMED, [WEATHER, ADD]).output_schema == ADD.parameters
    schema = read_tool_choice("required", [WEATHER, ADD]).output_schema
    assert schema is not None
    assert schema == {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": name},
                        "arguments": {"$ref": f"#/$defs/{name}"},
                    },
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
                for name in ("get_weather", "add")
            ]
        },
        "$defs": {"get_weather": WEATHER.parameters, "add": ADD.parameters},
    }
    single = read_tool_choice("required", [WEATHER, ADD], parallel=False).output_schema
    assert single == {**schema, "maxItems": 1}


def test_references_in_a_tools_schema_still_hold_in_the_whole():
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {
            "$ref": {"type": "string"},
            "enum": {"$ref": "#/$defs/Node"},
            "pair": {"prefixItems": [{"$ref": "#"}, {"$ref": "https://example.com/x"}]},
            "literal": {"enum": [{"$ref": "#/not/a/reference"}]},
        },
        "additionalProperties": False,
        "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    before = json.dumps(parameters)
    schema = read_tool_choice("required", [Tool("f", parameters)]).output_schema
    assert schema is not None
    assert schema["$defs"]["f"] == {
        "type": "object",
        "properties": {
            "$ref": {"type": "string"},
            "enum": {"$ref": "#/$defs/f/$defs/Node"},
            "pair": {"prefixItems": [{"$ref": "#/$defs/f"}, {"$ref": "https://example.com/x"}]},
            "literal": {"enum": [{"$ref": "#/not/a/reference"}]},
        },
        "additionalProperties": False,
        "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/f/$defs/Node"}}}},
    }
    assert json.dumps(parameters) == before


def test_the_finish_reason_depends_on_the_kind_of_choice():
    """OpenAI says 'stop' of a call that the client itself named (vllm#25054)."""
    reasons = {
        value if isinstance(value, str) else "named": [
            read_tool_choice(value, [ADD]).finish_reason(num_calls=count) for count in (0, 1)
        ]
        for value in ("auto", "required", NAMED)
    }
    assert reasons == {
        "auto": ["stop", "tool_calls"],
        "required": ["stop", "tool_calls"],
        "named": ["stop", "stop"],
    }


def test_a_named_call_streams_its_arguments_as_they_arrive():
    parser = answer_format(None).parser(read_tool_choice(NAMED, [ADD]))
    assert join(parser.push('{"a"')) == calls(("add", '{"a"'))
    assert parser.push(": 1}") == [ToolCallArguments(0, ": 1}")]
    assert parser.finish() == []


def test_required_calls_stream_their_arguments_as_they_arrive():
    parser = answer_format(None).parser(read_tool_choice("required", [WEATHER, ADD]))
    assert parser.push('[{"name": "add", "argu') == []
    assert len(parser.push('ments": {"a": 1')) == 2
    assert parser.push("2") == [ToolCallArguments(0, "2")]
    assert parser.push('}}, {"name"') == [ToolCallArguments(0, "}")]
    text = '[{"name": "add", "arguments": {"a": 12}}, {"name": "add", "arguments": {}}]'
    parser = answer_format(None).parser(read_tool_choice("required", [WEATHER, ADD]))
    assert parse(parser, [text]) == calls(("add", '{"a": 12}'), ("add", "{}"))


def test_an_answer_that_was_not_constrained_is_content():
    parser = answer_format(None).parser(read_tool_choice("required", [ADD]))
    assert parse(parser, ["I will not. ", "[]"]) == [Content("I will not. []")]
