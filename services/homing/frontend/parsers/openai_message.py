"""Events in the shapes of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from homing.frontend.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)


def delta(event: Event) -> dict[str, Any]:
    """What one event adds to a streamed message."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case ToolCallStart(index):
            return {"tool_calls": [{"index": index, **_call(event, "")}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case _:
            assert_never(event)


def message(events: Iterable[Event]) -> dict[str, Any]:
    """The whole message. Content is null if there are only calls; what is absent has no key."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart():
                calls.append(event)
                arguments.append([])
            case ToolCallArguments(index, fragment):
                arguments[index].append(fragment)
            case _:
                assert_never(event)
    whole: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        whole |= _reasoning("".join(reasoning))
    if calls:
        whole["content"] = whole["content"] or None
        whole["tool_calls"] = [
            _call(call, "".join(fragments))
            for call, fragments in zip(calls, arguments, strict=True)
        ]
    return whole


def _call(call: ToolCallStart, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, Any]:
    """Servers disagree about the name, so clients look for either."""
    return {"reasoning_content": text, "reasoning": text}
