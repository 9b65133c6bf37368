"""Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": {...}}`, several set apart by `;`.

`<|python_tag|>` may come first, and then content may come before it. Without it only an object at
the answer's start that names one of the request's tools is a call: any other is an answer in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from homing.frontend.parsers.call_json import end_of_value, read_calls
from homing.frontend.parsers.tool_calls import Reading, ToolFormat
from homing.frontend.parsers.tools import Tool

_TAG = "<|python_tag|>"


def llama3_json(tools: Sequence[Tool]) -> ToolFormat:
    names = frozenset(tool.name for tool in tools)
    return ToolFormat(
        read=partial(_read, names), openers=(_TAG,), bare_openers=("{", ";"), closers=("}",)
    )


def _read(names: frozenset[str], text: str, whole: bool) -> Reading | None:
    opener = _TAG if text.startswith(_TAG) else text[0]
    no_call = Reading(len(opener), [])
    undecided = no_call if whole else None
    body = text.removeprefix(_TAG).removeprefix(";").lstrip()
    start = len(text) - len(body)
    if not body:
        return undecided
    if body[0] != "{":
        return no_call
    end = end_of_value(text, start)
    if end is None:
        return undecided
    calls = read_calls(text[start:end], needs_arguments=True)
    if not calls or (opener != _TAG and calls[0].name not in names):
        return no_call
    return Reading(end, calls)
