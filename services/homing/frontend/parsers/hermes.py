"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Some, SmolLM2 among them, put an array of calls into one pair of tags.
"""

from __future__ import annotations

from collections.abc import Sequence

from homing.frontend.parsers.call_json import end_of_value, read_calls
from homing.frontend.parsers.tool_calls import Reading, ToolFormat
from homing.frontend.parsers.tools import Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NO_CALL = Reading(len(_OPEN), [])


def hermes(tools: Sequence[Tool]) -> ToolFormat:
    return ToolFormat(read=_read, openers=(_OPEN,), closers=(_CLOSE,))


def _read(text: str, whole: bool) -> Reading | None:
    undecided = _NO_CALL if whole else None
    body = text[len(_OPEN) :].lstrip()
    start = len(text) - len(body)
    if not body:
        return undecided
    if body[0] not in "{[":
        return _NO_CALL
    end = end_of_value(text, start)
    if end is None:
        return undecided
    calls = read_calls(text[start:end])
    rest = text[end:].lstrip()
    at = len(text) - len(rest)
    if not calls:
        return _NO_CALL
    if rest.startswith(_CLOSE):
        return Reading(at + len(_CLOSE), calls)
    if _CLOSE.startswith(rest):  # not there yet; at the end of an answer, it may be left out
        return Reading(len(text), calls) if whole else None
    if rest.startswith(_OPEN):
        return Reading(end, calls)
    return undecided if _OPEN.startswith(rest) else _NO_CALL
