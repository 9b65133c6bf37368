"""The shape that an answer must have, in the words of several servers.

response_format                     OpenAI: text, json_object or json_schema
structured_outputs                  vLLM: an object with one of json, json_object, regex,
                                    choice, grammar
guided_json, _regex, ...            vLLM before that
json_schema, regex, ebnf, grammar   SGLang and llama.cpp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from homing.errors import InvalidRequest
from homing.params import Choice, Grammar, JsonSchema, Regex, StructuredOutput


class NamedSchema(Struct):
    """`name`, `description` and `strict` change nothing: a schema is enforced, or refused."""

    schema: dict[str, Any]


class ResponseFormat(Struct):
    type: str
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None
    """Where llama.cpp and others want it, also beside `json_object`."""


_TEXT = ResponseFormat(type="text")


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredFields(Struct, kw_only=True):
    """The fields of a request that ask for a shape. One of them at most may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


def structured_output(request: StructuredFields) -> StructuredOutput | None:
    """What they ask for. Raises `InvalidRequest` naming the client's field."""
    names = StructuredFields.__struct_fields__
    asked = [name for name in names if getattr(request, name) not in (None, _TEXT)]
    if not asked:
        return None
    *others, name = asked
    if others:
        raise InvalidRequest(f"{' and '.join(asked)} exclude each other", field=name)
    try:
        return _READERS[name](getattr(request, name))
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from error


def _response_format(value: ResponseFormat) -> StructuredOutput:
    schema = value.json_schema.schema if value.json_schema else value.schema
    match value.type:
        case "json_object":
            return _json(schema or {"type": "object"})
        case "json_schema" if schema is not None:
            return _json(schema)
        case "json_schema":
            raise InvalidRequest("it has no json_schema")
        case other:
            raise InvalidRequest(
                f"its type is {other!r}; it must be text, json_object or json_schema"
            )


def _structured_outputs(value: StructuredOutputs) -> StructuredOutput:
    parts = msgspec.structs.asdict(value)
    given = {name: part for name, part in parts.items() if part is not None and part is not False}
    if len(given) != 1:
        names = " and ".join(given) or "nothing"
        raise InvalidRequest(f"it must ask for one thing, and asks for {names}")
    [(name, part)] = given.items()
    return _json({"type": "object"}) if name == "json_object" else _READERS[name](part)


def _json(schema: dict[str, Any] | str) -> JsonSchema:
    """Properties stay in their order: answers will have them in it."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return JsonSchema(text)


def _choice(choices: list[str]) -> Choice:
    return Choice(tuple(choices))


_READERS: dict[str, Callable[[Any], StructuredOutput]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **dict.fromkeys(("json", "guided_json", "json_schema"), _json),
    **dict.fromkeys(("regex", "guided_regex"), Regex),
    **dict.fromkeys(("choice", "guided_choice"), _choice),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), Grammar),
}
