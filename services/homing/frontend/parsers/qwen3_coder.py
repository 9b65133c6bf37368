"""Qwen3-Coder: XML, with each parameter as plain text between its tags.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The text says nothing of types: a value is a number, a boolean, an object and so on where the
tool's schema allows one and the text is one, and a string everywhere else. The models often leave
out the first line, and then write the last one all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from homing.frontend.parsers.schema_types import as_json, property_types
from homing.frontend.parsers.tool_calls import Reading, ToolCall, ToolFormat
from homing.frontend.parsers.tools import Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="
_MAX_NAME = 256

_HEADER = re.compile(r"<function=([^<>\n]{1,256})>")
# A value ends at the first closing tag with another tag behind it: code may hold one that has none.
_VALUE = re.compile(
    r"<parameter=([^<>\n]{1,256})>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
# Atomic, because a value must never grow to make the rest fit.
_CALL = re.compile(rf"{_HEADER.pattern}((?>\s*{_VALUE.pattern})*+)\s*{_FUNCTION_END}", re.DOTALL)


def qwen3_coder(tools: Sequence[Tool]) -> ToolFormat:
    schema_of_tool = {tool.name: tool.parameters for tool in tools}
    return ToolFormat(
        read=partial(_read, schema_of_tool),
        openers=(_OPEN, _FUNCTION),
        closers=(_FUNCTION_END, _CLOSE),
    )


def _read(schema_of_tool: Mapping[str, dict[str, Any]], text: str, whole: bool) -> Reading | None:
    no_call = Reading(len(_OPEN if text.startswith(_OPEN) else _FUNCTION), [])
    body = text.removeprefix(_OPEN).lstrip()
    match = _CALL.match(body)
    if not match:
        return None if _may_become_call(body) and not whole else no_call
    calls = [_tool_call(match, schema_of_tool)]
    behind = body[match.end() :].lstrip()
    if behind.startswith(_CLOSE):
        return Reading(len(text) - len(behind) + len(_CLOSE), calls)
    if not whole and _CLOSE.startswith(behind):
        return None
    return Reading(len(text) - len(body) + match.end(), calls)


def _may_become_call(body: str) -> bool:
    header = _HEADER.match(body)
    if header:
        inside = body[header.end() :].lstrip()
        tags = (_PARAMETER, _FUNCTION_END)
        return any(inside.startswith(tag) or tag.startswith(inside) for tag in tags)
    if len(body) > len(_FUNCTION) + _MAX_NAME or "\n" in body or ">" in body:
        return False
    return body.startswith(_FUNCTION) or _FUNCTION.startswith(body)


def _tool_call(match: re.Match[str], schema_of_tool: Mapping[str, dict[str, Any]]) -> ToolCall:
    name, parameters = match[1].strip(), match[2]
    schema = schema_of_tool.get(name, {})
    values: dict[str, str] = {}
    for value in _VALUE.finditer(parameters + _FUNCTION_END):
        key = value[1].strip()
        values[key] = as_json(_without_line_ends(value[2]), property_types(schema, key))
    members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return ToolCall(name, f"{{{', '.join(members)}}}")


def _without_line_ends(value: str) -> str:
    """The value without the line ends that set it apart from its tags."""
    return value.removeprefix("\n").removesuffix("\n")
