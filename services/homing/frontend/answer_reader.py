"""A chat's answer as it comes: what of its text is content, reasoning or a tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from homing.client import Part
from homing.frontend.parsers import AnswerFormat, Event, Reasoning, ToolCallStart, ToolChoice
from homing.frontend.text import Piece, join
from homing.wire import FinishReason


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers to one request are read."""

    format: AnswerFormat
    choice: ToolChoice
    prompt_end: str
    """The last characters of the rendered prompt: it may open the thoughts."""
    show_reasoning: bool = True


class Pieces(Protocol):
    """Gives the pieces of one choice."""

    def push(self, part: Part) -> Piece | None: ...


class AnswerReader:
    """Takes one choice's parts in order, and gives pieces with their events.

    A piece whose text means nothing yet waits for the next one, with its tokens.
    """

    def __init__(self, text: Pieces, reading: AnswerReading) -> None:
        self._text = text
        self._reading = reading
        self._parser = reading.format.parser(reading.choice, prompt_end=reading.prompt_end)
        self._num_calls = 0
        self._held: list[Piece] = []

    def push(self, part: Part) -> Piece | None:
        piece = self._text.push(part)
        if piece is None:
            return None
        if self._parser.is_reasoning:
            piece.num_reasoning_tokens = len(piece.tokens)
        piece.events = self._shown(self._parser.push(piece.text))
        if piece.finish_reason is not None:
            piece.events += self._shown(self._parser.finish())
            piece.finish_reason = self._finish_reason(piece.finish_reason)
        elif not piece.events:
            self._held.append(piece)
            return None
        held, self._held = self._held, []
        return join([*held, piece]) if held else piece

    def _shown(self, events: list[Event]) -> list[Event]:
        self._num_calls += sum(isinstance(event, ToolCallStart) for event in events)
        if self._reading.show_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _finish_reason(self, reason: str) -> str:
        if reason != FinishReason.STOP:
            return reason
        return self._reading.choice.finish_reason(num_calls=self._num_calls)
