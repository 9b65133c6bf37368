"""What a parser finds in a model's answer, piece by piece.

A parser takes the answer's text as it is generated and gives back events. Joined, the events do not
depend on where the text was cut, so a streamed answer equals the same answer in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool is called. Its arguments follow, before the next call starts."""

    index: int
    """Counts the answer's calls from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. All fragments of one call, joined, are a JSON object."""

    index: int
    fragment: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


class Parser(Protocol):
    """Parses one answer. Never raises: what it does not understand is content."""

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; what is certain now."""
        ...

    def finish(self) -> list[Event]:
        """The answer ended; what was held back. To be called once."""
        ...


class PlainText:
    """The parser of answers that have no structure: all is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
