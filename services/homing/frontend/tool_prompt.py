"""Tools for chat templates that know none: told in a system message, as Hermes models are told.

Calls and results of earlier turns become text in the same format, which the parser `hermes` reads
in answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

FORMAT_TOLD = "hermes"
"""The parser of the format that the instructions ask for."""

_INSTRUCTIONS = """\
You may call functions to assist with the user's query. These are the functions, as JSON schemas:
<tools>
{tools}
</tools>

For each function call return a JSON object with the function's name and its arguments within
<tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def knows_tools(chat_template: str | None) -> bool:
    """Whether a template has a place for tools."""
    return "tools" in (chat_template or "")


def with_tools_told(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages with the tools, and what was called so far, in plain text.

    The instructions join the system message that comes first, or are one of their own.
    """
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    first, rest = [], list(messages)
    if rest and rest[0]["role"] == "system":
        first = [rest.pop(0)["content"]]
    system = {"role": "system", "content": "\n\n".join([*filter(None, first), instructions])}
    return [system, *map(_in_plain_text, rest)]


def _in_plain_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {**message, "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        texts = [message["content"], *map(_call_text, calls)]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**plain, "content": "\n".join(filter(None, texts))}
    return message


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    named = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(named, ensure_ascii=False)}\n</tool_call>"
