"""The grammar of an answer that has a given shape unless the model calls tools instead.

Calls are written as the model is used to, and read by the parser of that format. Where a format is
not here, there is no such grammar: its calls are more than marks around JSON.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from homing.frontend.parsers.tool_choice import ToolChoice, one_call_schema
from homing.params.structured import JSON_WHITESPACE


class _Written(NamedTuple):
    """How a family of models writes a call."""

    before: str
    after: str
    between: str
    """Of two calls."""
    arguments: str
    """What it names them."""


_WRITTEN = {
    "hermes": _Written("<tool_call>", "</tool_call>", "", "arguments"),
    "llama3_json": _Written("", "", ";", "parameters"),
}


def answer_or_calls(schema: str, choice: ToolChoice, tool_format: str | None) -> str | None:
    """Lark text of an answer that fits the JSON schema, or is one call or more. None: there is none
    for this format of calls."""
    if tool_format not in _WRITTEN:
        return None
    written = _WRITTEN[tool_format]
    answer = msgspec.json.decode(schema, type=dict[str, Any])
    call = one_call_schema(choice.tools, arguments=written.arguments)
    more = f" ({_text(written.between)} call)*" if choice.parallel else ""
    return f"""\
start: answer | calls
calls: call{more}
call: space {_text(written.before)} space named space {_text(written.after)} space
space: /[ \\n]{{0,2}}/
answer: %json {_json(answer)}
named: %json {_json(call)}
"""


def _text(text: str) -> str:
    return f'"{text}"'


def _json(schema: dict[str, Any]) -> str:
    guidance = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return msgspec.json.encode(guidance | schema).decode()
