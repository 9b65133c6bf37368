"""Tool calls written as JSON: where a value ends, and which call it is.

Arguments are passed on as the model wrote them, not decoded and encoded again: numbers keep their
digits.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from homing.frontend.parsers.tool_calls import ToolCall

_BRACKET_OR_STRING = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*+("?)', re.DOTALL)

_NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)


class _Call(Struct):
    name: str
    arguments: Raw = Raw()
    parameters: Raw = Raw()
    """What Llama calls them."""


_CALL_DECODER = msgspec.json.Decoder(_Call)
_CALLS_DECODER = msgspec.json.Decoder(list[_Call])
_STRING_DECODER = msgspec.json.Decoder(str)


def end_of_value(text: str, start: int) -> int | None:
    """Where the object or array that opens at `start` ends; None if it does not, yet.

    Looks at brackets and strings only: whether it is JSON, its decoder says.
    """
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, start):
        mark = match[0]
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if depth == 0:
                return match.end()
        elif not match[1]:
            return None  # a string that is still open
    return None


def is_object(text: str) -> bool:
    """Whether this is a JSON object."""
    return _is(text, dict[str, Raw])


def is_array(text: str) -> bool:
    """Whether this is a JSON array."""
    return _is(text, list[Raw])


def _is(text: str, kind: type) -> bool:
    try:
        msgspec.json.decode(text, type=kind)
    except _NOT_JSON:
        return False
    return True


def read_calls(text: str, *, needs_arguments: bool = False) -> list[ToolCall]:
    """The calls that a JSON object, or an array of them, describes. Empty if any is not a call.

    `needs_arguments`: an object with a name alone is no call.
    """
    try:
        is_list = text.startswith("[")
        found = _CALLS_DECODER.decode(text) if is_list else [_CALL_DECODER.decode(text)]
        calls = [ToolCall(call.name, _arguments(call, needs_arguments)) for call in found]
    except (*_NOT_JSON, _NoCallError):
        return []
    return calls if all(call.name for call in calls) else []


class _NoCallError(Exception):
    """JSON, but not a call."""


def _arguments(call: _Call, needed: bool) -> str:
    """A JSON object as text; some models write that text as a JSON string."""
    written = bytes(call.arguments) or bytes(call.parameters)
    if written == b"null" or (not written and not needed):
        return "{}"
    text = _STRING_DECODER.decode(written) if written.startswith(b'"') else written.decode()
    if not is_object(text):
        raise _NoCallError
    return text
