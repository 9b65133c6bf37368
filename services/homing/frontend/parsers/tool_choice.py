"""What a request lets the model call, and the JSON that constrained decoding holds it to.

    auto      the model decides; its own format, found by a parser
    none      no calls
    required  at least one call: `[{"name": ..., "arguments": {...}}, ...]`
    named     that call: its arguments alone

The last two are the same for all models: the grammar sees to it that a call fits its schema, and
`constrained` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from homing.errors import InvalidRequest
from homing.frontend.parsers.tools import Tool

_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LITERALS = {"enum", "const", "default", "examples"}
_IDENTIFIERS = {"$id", "$schema"}
"""They would make references relative to something else than the root."""


class ToolChoiceMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True)
class ToolChoice:
    mode: ToolChoiceMode
    tools: tuple[Tool, ...]
    """Those that may be called; in mode NAMED the only one."""
    parallel: bool = True
    """Whether there may be several calls."""

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """JSON schema of the whole answer; None where the model is free."""
        match self.mode:
            case ToolChoiceMode.AUTO | ToolChoiceMode.NONE:
                return None
            case ToolChoiceMode.REQUIRED:
                return _calls_schema(self.tools, parallel=self.parallel)
            case ToolChoiceMode.NAMED:
                return _arguments_schema(self.tools[0], root="#")

    def finish_reason(self, *, num_calls: int) -> str:
        """What an answer that stopped by itself finished with: OpenAI's words."""
        called = num_calls > 0 and self.mode is not ToolChoiceMode.NAMED
        return "tool_calls" if called else "stop"


def read_tool_choice(value: Any, tools: list[Tool], *, parallel: bool | None = None) -> ToolChoice:
    """What an OpenAI request's `tool_choice` means. Raises `InvalidRequest` if it cannot be.

    `parallel`: the request's `parallel_tool_calls`.
    """
    if value is None:
        value = "auto" if tools else "none"
    mode, offered = _mode_and_tools(value, tools)
    return ToolChoice(mode, offered, parallel=parallel is not False)


def _mode_and_tools(value: Any, tools: list[Tool]) -> tuple[ToolChoiceMode, tuple[Tool, ...]]:
    if value in ("auto", "none"):
        return ToolChoiceMode(value), tuple(tools)
    if value == "required":
        if not tools:
            raise InvalidRequest("tool_choice 'required' needs tools", field="tool_choice")
        return ToolChoiceMode.REQUIRED, tuple(tools)
    name = _chosen_name(value)
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        offered = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(
            f"tool_choice names {name!r}; the request's tools are: {offered}", field="tool_choice"
        )
    return ToolChoiceMode.NAMED, chosen


def _chosen_name(value: Any) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value.get("type", "function") != "function":
        raise InvalidRequest(
            "tool_choice must be 'auto', 'none', 'required' or"
            ' {"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    return name


def _calls_schema(tools: tuple[Tool, ...], *, parallel: bool) -> dict[str, Any]:
    """An array of calls."""
    call = one_call_schema(tools)
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": call["anyOf"]},
        "$defs": call["$defs"],
    }
    return schema if parallel else {**schema, "maxItems": 1}


def one_call_schema(tools: tuple[Tool, ...], *, arguments: str = "arguments") -> dict[str, Any]:
    """A call of one of the tools; `arguments`: what the model calls them. Each tool's schema is one
    definition, into which its own references are redirected, so that equal names in two tools do
    not meet."""
    return {
        "anyOf": [_call_schema(tool, arguments) for tool in tools],
        "$defs": {
            tool.name: _arguments_schema(tool, root=f"#/$defs/{tool.name}") for tool in tools
        },
    }


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    """Name first: a client learns which tool is called before it has the arguments."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            arguments: {"$ref": f"#/$defs/{tool.name}"},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _arguments_schema(tool: Tool, *, root: str) -> dict[str, Any]:
    return {"type": "object", **_moved(tool.parameters, root)}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references still hold when it no longer is the document, but at `root`."""
    if isinstance(schema, list):
        return [_moved(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _moved_keyword(keyword, value, root)
        for keyword, value in schema.items()
        if keyword not in _IDENTIFIERS
    }


def _moved_keyword(keyword: str, value: Any, root: str) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _moved(schema, root) for name, schema in value.items()}
    if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
        return root + value.removeprefix("#")
    return _moved(value, root)
