"""The tools that a request offers to the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from homing.errors import InvalidRequest

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Tool(NamedTuple):
    name: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""


def read_tools(tools: Any) -> list[Tool]:
    """The tools in an OpenAI request's `tools`. Raises `InvalidRequest` for what is none."""
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidRequest("tools must be an array", field="tools")
    found: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        tool = _read_tool(entry, f"tools[{index}]")
        if tool.name in found:
            raise InvalidRequest(f"two tools are named {tool.name!r}", field=f"tools[{index}]")
        found[tool.name] = tool
    return list(found.values())


def _read_tool(entry: Any, field: str) -> Tool:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or entry.get("type", "function") != "function":
        raise InvalidRequest(
            f"{field} must be an object with type 'function' and a function", field=field
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{field}.function.name must be 1 to 128 letters, digits, '_', '-' or '.'",
            field=f"{field}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{field}.function.parameters must be a JSON schema",
            field=f"{field}.function.parameters",
        )
    return Tool(name, _NO_PARAMETERS if parameters is None else parameters)
