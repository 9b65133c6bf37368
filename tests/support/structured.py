"""Definitions that random tokens can satisfy to the end, and whether a text satisfies them."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np

from homing.engine.structured.grammar import CompiledGrammar
from homing.params import Choice, Grammar, JsonSchema, Regex, StructuredOutput
from homing.tokenizer import Tokenizer


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested objects": closed(
        name={"type": "string", "maxLength": 12},
        address=closed(
            zip={"type": "string", "pattern": "^[0-9]{5}$"},
            geo={
                "type": "array",
                "prefixItems": [{"type": "number"}, {"type": "number"}],
                "items": False,
                "minItems": 2,
            },
        ),
    ),
    "arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "minItems": 2,
        "maxItems": 4,
    },
    "enums": closed(
        color={"enum": ["red", "grün", "青", None, 7, ["a", {"b": 1.5}]]},
        kind={"const": {"exactly": ["this", None]}},
    ),
    "numbers": closed(
        age={"type": "integer", "minimum": 0, "maximum": 130},
        ratio={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        even={"type": "integer", "multipleOf": 2, "minimum": -50, "maximum": 50},
        any={"type": "number"},
    ),
    "strings": closed(
        text={"type": "string", "minLength": 3, "maxLength": 16},
        code={"type": "string", "pattern": r'^[a-f"\\\n]{2,6}$'},
        day={"type": "string", "format": "date"},
        id={"type": "string", "format": "uuid"},
    ),
    "names of several bytes": closed(
        **{"naïve": {"type": "null"}, "雪☃": {"type": "boolean"}, 'a"\\\n': {"type": "integer"}}
    ),
    "unions": {
        "anyOf": [
            closed(kind={"const": "circle"}, radius={"type": "number"}),
            closed(kind={"const": "box"}, sides={"type": "array", "items": {"type": "integer"}}),
            {"type": "null"},
        ]
    },
    "references": {
        "$defs": {
            "tree": closed(value={"type": "integer"}, left={"$ref": "#/$defs/leaf"}),
            "leaf": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
        },
        "$ref": "#/$defs/tree",
    },
    "optional properties": {
        **closed(a={"type": "integer"}, b={"type": "null"}, c={"type": "boolean"}),
        "required": ["b"],
    },
    "intersection": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 999}]},
}

DEFINITIONS: dict[str, StructuredOutput] = {
    **{name: JsonSchema(json.dumps(schema)) for name, schema in SCHEMAS.items()},
    "regex": Regex(r"(\d{1,3}\.){3}\d{1,3} [^\x00-\x7f]{1,4} (é|\n|\\)?"),
    "choice": Choice(("yes", "yes, sir", "no\n", "(a|b)*", "ß€😀", 'quote"\\')),
    "gbnf": Grammar('root ::= term ("+" term){0,3}\nterm ::= [0-9]{1,3} | "(" root ")"'),
    "lark": Grammar('start: WORD (" " WORD)~1..3\nWORD: /[a-zé]{1,5}/'),
}
_PATTERNS = {
    "gbnf": r"[0-9+()]+",
    "lark": r"[a-zé]{1,5}( [a-zé]{1,5}){1,3}",
}


def check_fits(name: str, text: str) -> None:
    """Raise unless `text` fits the definition of this name."""
    definition = DEFINITIONS[name]
    match definition:
        case JsonSchema():
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=checker)
        case Regex(pattern=pattern):
            assert re.fullmatch(pattern, text)
        case Choice(choices=choices):
            assert text in choices
        case Grammar():
            assert re.fullmatch(_PATTERNS[name], text)


def allowed(grammar: Any, vocab_size: int) -> np.ndarray:
    """The ids that may follow, ascending."""
    mask = np.empty(-(-vocab_size // 32), np.uint32)
    grammar.fill_mask(mask)
    assert grammar.error is None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little"))


def random_walk(
    grammar: CompiledGrammar, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> list[int]:
    """Token ids of one answer, each drawn from all that may follow, short ones preferred."""
    random = np.random.default_rng(seed)
    state = grammar.start()
    tokens: list[int] = []
    while not state.finished:
        tokens.append(int(random.choice(allowed(state, vocab_size))))
        state.accept(tokens[-1])
        assert state.error is None
        assert len(tokens) < 2000, tokenizer.decode(tokens)
    return tokens
