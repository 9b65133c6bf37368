"""How clients ask for the shape of an answer, and what is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homing.errors import InvalidRequest
from homing.frontend.openai.requests import read_chat, read_completion
from homing.frontend.openai.sampling import chat_params, completion_params
from homing.frontend.openai.tools import tool_choice
from homing.params import Choice, Grammar, JsonSchema, Regex, SamplingParams

SCHEMA = {"type": "object", "properties": {"ü": {}, "b": {}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"ü":{},"b":{},"a":{}}}'


def completion(**fields: Any) -> SamplingParams:
    return completion_params(read_completion(json.dumps({"prompt": "x", **fields})))


def chat(**fields: Any) -> SamplingParams:
    request = read_chat(json.dumps({"messages": [], **fields}))
    return chat_params(request, tool_choice(request), "hermes")


OF_BOTH = pytest.mark.parametrize("params_of", [completion, chat])


@OF_BOTH
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, JsonSchema('{"type":"object"}')),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, JsonSchema(SCHEMA_TEXT)),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
            JsonSchema(SCHEMA_TEXT),
        ),
        ("structured_outputs", {"json": SCHEMA}, JsonSchema(SCHEMA_TEXT)),
        ("structured_outputs", {"json": SCHEMA_TEXT, "regex": None}, JsonSchema(SCHEMA_TEXT)),
        ("structured_outputs", {"json": {}}, JsonSchema("{}")),
        ("structured_outputs", {"json_object": True}, JsonSchema('{"type":"object"}')),
        ("structured_outputs", {"regex": "a+"}, Regex("a+")),
        ("structured_outputs", {"choice": ["a", "b"]}, Choice(("a", "b"))),
        ("structured_outputs", {"grammar": "start: A"}, Grammar("start: A")),
        ("guided_json", SCHEMA, JsonSchema(SCHEMA_TEXT)),
        ("guided_json", SCHEMA_TEXT, JsonSchema(SCHEMA_TEXT)),
        ("guided_regex", "a+", Regex("a+")),
        ("guided_choice", ["a", "b"], Choice(("a", "b"))),
        ("guided_grammar", "start: A", Grammar("start: A")),
        ("json_schema", SCHEMA_TEXT, JsonSchema(SCHEMA_TEXT)),
        ("regex", "a+", Regex("a+")),
        ("ebnf", 'root ::= "a"', Grammar('root ::= "a"')),
        ("grammar", 'root ::= "a"', Grammar('root ::= "a"')),
    ],
)
def test_each_way_to_ask_for_a_shape_is_understood(params_of, field, value, expected):
    assert params_of(**{field: value}).structured_output == expected
    assert params_of(**{field: None}).structured_output is None


@OF_BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}),
        ("response_format", {"type": "xml"}),
        ("response_format", {}),
        ("response_format", "json_object"),
        ("response_format", []),
        ("structured_outputs", {}),
        ("structured_outputs", {"json_object": False}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"structural_tag": "{}"}),
        ("guided_json", "{"),
        ("guided_json", "5"),
        ("guided_regex", ""),
        ("guided_choice", []),
        ("guided_choice", ["a", ""]),
        ("guided_grammar", ["a"]),
        ("regex", 5),
        ("ebnf", "x" * 200_000),
    ],
)
def test_a_malformed_shape_is_refused_by_name(params_of, field, value):
    with pytest.raises(InvalidRequest) as caught:
        params_of(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)


@OF_BOTH
def test_two_shapes_at_once_are_refused(params_of):
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    with pytest.raises(InvalidRequest, match="response_format and guided_regex exclude") as caught:
        params_of(**both)
    assert caught.value.field == "guided_regex"
    text = {"response_format": {"type": "text"}, "guided_regex": "a"}
    assert params_of(**text).structured_output == Regex("a")
