"""What shape of an answer may be asked for, and how that crosses the wire."""

from __future__ import annotations

import msgspec
import pytest

from homing.errors import InvalidRequest
from homing.params import Choice, Grammar, JsonSchema, Regex, SamplingParams, StructuredOutput
from homing.params.structured import MAX_CHARACTERS

EACH_KIND = [
    JsonSchema('{"type": "object"}'),
    JsonSchema("{}"),
    Regex("[a-c]+"),
    Choice(("yes", "no", "ja\n")),
    Grammar('start: "ü"'),
]


@pytest.mark.parametrize("definition", EACH_KIND)
def test_a_definition_survives_the_wire(definition: StructuredOutput):
    params = SamplingParams(structured_output=definition)
    assert SamplingParams.from_bytes(params.to_bytes()) == params


def test_no_definition_costs_no_byte_on_the_wire():
    assert b"structured" not in SamplingParams(seed=1).to_bytes()


@pytest.mark.parametrize("kind", [JsonSchema, Regex, Grammar])
@pytest.mark.parametrize("text", ["", "1" * (MAX_CHARACTERS + 1)])
def test_an_empty_or_endless_definition_is_refused(kind: type, text: str):
    with pytest.raises(InvalidRequest, match=f"from 1 to {MAX_CHARACTERS:,}") as caught:
        kind(text)
    assert caught.value.field == "structured_output"


@pytest.mark.parametrize("schema", ["{", "[]", '"object"', "true", "null", '{"a":' * 9_999])
def test_a_schema_that_is_no_json_object_is_refused(schema: str):
    with pytest.raises(InvalidRequest, match="not a JSON object"):
        JsonSchema(schema)


@pytest.mark.parametrize("choices", [(), ("a", ""), ("a" * MAX_CHARACTERS, "b")])
def test_choices_that_are_none_or_empty_or_endless_are_refused(choices: tuple[str, ...]):
    with pytest.raises(InvalidRequest):
        Choice(choices)


def test_a_definition_of_no_known_kind_is_refused_when_read():
    data = SamplingParams(structured_output=Regex("a")).to_bytes().replace(b"regex", b"xeger")
    with pytest.raises(InvalidRequest, match="structured_output"):
        SamplingParams.from_bytes(data)


def test_bytes_hold_the_definition_by_name():
    data = SamplingParams(structured_output=Choice(("a", "b"))).to_bytes()
    expected = {"structured_output": {"type": "choice", "choices": ["a", "b"]}}
    assert msgspec.msgpack.decode(data) == expected
