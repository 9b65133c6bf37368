"""What a JSON schema says a value written as plain text is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from homing.frontend.parsers.call_json import is_array, is_object

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_DEPTH = 16

_IS_TYPE = {
    "null": lambda text: text == "null",
    "boolean": lambda text: text in ("true", "false"),
    "integer": _INTEGER.fullmatch,
    "number": _NUMBER.fullmatch,
    "object": is_object,
    "array": is_array,
}

_TYPE_OF_VALUE = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    str: "string",
}


def property_types(schema: dict[str, Any], name: str) -> set[str]:
    """The JSON types that an object's schema allows for a property. Empty if it does not say."""
    properties = schema.get("properties")
    subschema = properties.get(name) if isinstance(properties, dict) else None
    return set(_types(subschema, schema, _MAX_DEPTH))


def as_json(text: str, types: set[str]) -> str:
    """The JSON of a value that may be of these types: a string, unless it is one of the others."""
    value = text.strip()
    if value.lower() in ("true", "false", "null"):  # models know Python, too
        value = value.lower()
    if any(is_type(value) for name, is_type in _IS_TYPE.items() if name in types):
        return value
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: dict[str, Any], depth: int) -> Iterator[str]:
    """`depth`: how many more references and alternatives are followed; schemas may be circular."""
    if not isinstance(schema, dict) or depth == 0:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    else:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if "const" in schema else values
        yield from (_TYPE_OF_VALUE[type(value)] for value in values)
    for keyword in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(keyword)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            yield from _types(alternative, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolve(reference, root), root, depth - 1)


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """What a reference into the same schema points to; None if there is nothing (RFC 6901)."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found if reference.startswith("#") else None
