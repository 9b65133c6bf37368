"""Feeding a parser, and what its events come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from homing.frontend.parsers import (
    Content,
    Event,
    Parser,
    Reasoning,
    Tool,
    ToolCallArguments,
    ToolCallStart,
)

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
        },
        "required": ["city"],
    },
)
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "number"}}})


def parse(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """The events of an answer that arrives in these pieces, those of one kind in a row joined.

    Ids are random and replaced by "id".
    """
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return join(events + parser.finish())


def join(events: Sequence[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case Content(before), Content(text):
                joined[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                joined[-1] = ToolCallArguments(index, before + text)
            case _, ToolCallStart(index, _, name):
                joined.append(ToolCallStart(index, "id", name))
            case _:
                joined.append(event)
    return joined


def calls(*named_arguments: tuple[str, str]) -> list[Event]:
    """The events of these calls, in this order."""
    return [
        event
        for index, (name, arguments) in enumerate(named_arguments)
        for event in (ToolCallStart(index, "id", name), ToolCallArguments(index, arguments))
    ]


def content(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))
