"""Mistral: `[TOOL_CALLS]` and either an array of calls or, since 2025, a name and its arguments.

    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, ...]
    [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]...
    [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}...

The marks are special tokens. Where they are not decoded, an array at the answer's start is still
found; the newer forms need them.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from homing.frontend.parsers.call_json import end_of_value, is_object, read_calls
from homing.frontend.parsers.tool_calls import Reading, ToolCall, ToolFormat
from homing.frontend.parsers.tools import Tool

_MARK = "[TOOL_CALLS]"
_HEADER = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?")
_MAX_HEADER = 256


def mistral(tools: Sequence[Tool]) -> ToolFormat:
    return ToolFormat(
        read=_read, openers=(_MARK,), bare_openers=("[",), closers=("}", "]"), new_id=_new_id
    )


def _new_id() -> str:
    """Mistral's chat templates refuse any other length and any other character."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _read(text: str, whole: bool) -> Reading | None:
    if text.startswith(_MARK):
        body = text[len(_MARK) :].lstrip()
        if not body and not whole:
            return None
        if not body.startswith("["):
            return _read_named(text, whole)
        return _read_array(text, len(text) - len(body), len(_MARK), whole)
    if not whole and _MARK.startswith(text):
        return None
    return _read_array(text, 0, 1, whole)


def _read_array(text: str, start: int, opener_length: int, whole: bool) -> Reading | None:
    no_call = Reading(opener_length, [])
    if len(text) > start + 1 and not text[start + 1 :].lstrip().startswith("{"):
        return no_call if whole or text[start + 1 :].strip() else None
    end = end_of_value(text, start)
    if end is None:
        return no_call if whole else None
    calls = read_calls(text[start:end], needs_arguments=opener_length == 1)
    return Reading(end, calls) if calls else no_call


def _read_named(text: str, whole: bool) -> Reading | None:
    no_call = Reading(len(_MARK), [])
    start = text.find("{", 0, _MAX_HEADER)
    if start < 0:
        return no_call if whole or len(text) >= _MAX_HEADER else None
    header = _HEADER.fullmatch(text, len(_MARK), start)
    if not header:
        return no_call
    end = end_of_value(text, start)
    if end is None:
        return no_call if whole else None
    arguments = text[start:end]
    return Reading(end, [ToolCall(header[1], arguments)]) if is_object(arguments) else no_call
