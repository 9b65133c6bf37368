"""A request's messages as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Message = dict[str, Any]


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with what OpenAI's clients write turned into what templates read.

    - A tool call's arguments are a JSON string there, and a mapping here.
    - The content of a message that calls tools may be null or left out there; it is text here.
    - Reasoning goes by two names there, and by one here.

    The messages given are not changed. Arguments that are not a JSON object stay as they are.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> Message:
    if message.get("role") != "assistant":
        return message
    changed: Message = {}
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_template_call(call) for call in calls]
        if message.get("content") is None:
            changed["content"] = ""
    if "reasoning" in message and message.get("reasoning_content") is None:
        changed["reasoning_content"] = message["reasoning"]
    return {**message, **changed}


def _template_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _mapping(function["arguments"])}}


def _mapping(arguments: str) -> dict[str, Any] | str:
    if not arguments.strip():
        return {}  # some clients write a call without arguments so
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
