"""Required and named calls, written by chance under the real grammar library, are always calls of
an offered tool whose arguments fit its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest

from homing.engine.structured.compiler import GrammarCompiler
from homing.frontend.parsers import (
    Content,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    ToolChoice,
    answer_format,
    message,
    read_tool_choice,
)
from homing.params import JsonSchema
from homing.tokenizer import Tokenizer
from tests.support.answers import parse
from tests.support.byte_model import EOS, byte_level
from tests.support.structured import random_walk

VOCAB_SIZE = 300
TREE = Tool(
    "grow_tree",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"root": {"$ref": "#/$defs/node"}, "kind": {"enum": ["oak", "}{"]}},
        "required": ["root", "kind"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "height": {"type": "integer", "minimum": 0, "maximum": 9},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["height", "left"],
                "additionalProperties": False,
            }
        },
    },
)
PAINT = Tool(
    "paint",
    {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}},
        "required": ["node"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "boolean"}},  # another "node" than the tree's
    },
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = {tool.name: tool for tool in (TREE, PAINT, NOW)}
SEEDS = range(25)


@pytest.fixture(scope="module")
def write(tmp_path_factory) -> Iterator:
    """What a model writes that chooses by chance among the tokens that a schema allows."""
    directory = byte_level(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = Tokenizer.from_dir(directory)
    compiler = GrammarCompiler(directory, VOCAB_SIZE, (EOS,))

    def written(choice: ToolChoice, seed: int) -> str:
        definition = JsonSchema(json.dumps(choice.output_schema))
        grammar = compiler.compile(definition).result()
        tokens = random_walk(grammar, tokenizer, VOCAB_SIZE, seed)
        return tokenizer.to_bytes(tokens[:-1]).decode()

    yield written
    compiler.close()


def read(choice: ToolChoice, text: str) -> list[tuple[str, object]]:
    """Name and arguments of the answer's calls. It is nothing but calls."""
    events = parse(answer_format(None).parser(choice), text)
    assert all(isinstance(event, ToolCallStart | ToolCallArguments) for event in events)
    calls = message(events)["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_fit_the_tools_that_they_name(write, parallel):
    choice = read_tool_choice("required", list(TOOLS.values()), parallel=parallel)
    seen = set()
    for seed in SEEDS:
        calls = read(choice, write(choice, seed))
        assert len(calls) == 1 or (parallel and calls)
        for name, arguments in calls:
            jsonschema.validate(arguments, TOOLS[name].parameters)
            seen.add(name)
    assert seen == set(TOOLS)


@pytest.mark.parametrize("name", TOOLS)
def test_a_named_call_fits_its_tool(write, name):
    choice = read_tool_choice({"function": {"name": name}}, list(TOOLS.values()))
    for seed in SEEDS[:8]:
        ((called, arguments),) = read(choice, write(choice, seed))
        assert called == name
        jsonschema.validate(arguments, TOOLS[name].parameters)


def test_an_answer_that_is_cut_short_keeps_the_calls_that_began(write):
    choice = read_tool_choice("required", [TREE])
    text = write(choice, 3)
    at = text.index('"arguments"') + len('"arguments": {"')
    start, arguments = parse(answer_format(None).parser(choice), [text[:at]])
    assert isinstance(start, ToolCallStart)
    assert isinstance(arguments, ToolCallArguments)
    assert text[:at].endswith(arguments.fragment)
    assert parse(answer_format(None).parser(choice), [text[:9]]) == [Content(text[:9])]
