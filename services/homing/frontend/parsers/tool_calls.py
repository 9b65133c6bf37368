"""Finding tool calls in text that arrives in pieces: what all formats share.

A format says what a call may begin with, and reads one from there. A call is announced once it is
whole and correct: what was sent cannot be taken back, and half a call whose rest turns out to be
none would be worse than a late one. What is not a call stays content, to the last character.

A reader does not change its mind: what it says of a text, it says of every longer one. That is why
the answer does not depend on where its text was cut.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from homing.frontend.parsers.events import Content, Event, ToolCallArguments, ToolCallStart
from homing.frontend.parsers.marks import may_start_at

_SMALL = 512
"""Characters that are read anew with each piece. A longer text is read when it may be complete, so
that a call of n characters costs about n steps and not n * n."""


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object, as text."""


class Reading(NamedTuple):
    """The first `length` characters, at least one, are these calls; content, if there are none."""

    length: int
    calls: list[ToolCall]


Reader = Callable[[str, bool], Reading | None]
"""(text that begins with an opener, whether no more will come) -> what it begins with. None, only
while more may come: that depends on what follows."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes its calls."""

    read: Reader
    openers: tuple[str, ...]
    """What a call begins with, anywhere in the answer."""
    closers: tuple[str, ...]
    """What a call ends with: a long text is not read before there is one."""
    bare_openers: tuple[str, ...] = ()
    """Single characters that a call begins with where nothing but calls came before."""
    new_id: Callable[[], str] = new_call_id


class ToolCallParser:
    """Parses one answer into content and calls.

    White space before a call, and after the last one, is dropped: it sets the calls apart.
    """

    def __init__(self, tool_format: ToolFormat, *, parallel: bool = True) -> None:
        """`parallel`: False keeps the first call and drops all others."""
        self._format = tool_format
        self._parallel = parallel
        self._space = ""  # white space that is not yet known to be content
        self._pending = ""  # follows it: an opener, or what may become one, and all after it
        self._num_read = 0  # characters of pending that hold no unread closer
        self._num_calls = 0
        self._bare = True  # no content since the start, or since the last call

    def push(self, text: str) -> list[Event]:
        self._pending += text
        return self._scan(whole=False)

    def finish(self) -> list[Event]:
        events = self._scan(whole=True)
        if self._space and not (self._num_calls and self._bare):
            events.append(Content(self._space))
        return events

    def _scan(self, *, whole: bool) -> list[Event]:
        events: list[Event] = []
        while self._pending:
            start = self._find_opener(whole=whole)
            events += self._content(self._take(start))
            if not self._pending.startswith(self._openers()) or not self._worth_reading(whole):
                break
            reading = self._format.read(self._pending, whole)
            if reading is None:
                break
            text = self._take(reading.length)
            events += self._calls(reading.calls) if reading.calls else self._content(text)
        return events

    def _openers(self) -> tuple[str, ...]:
        return self._format.openers + (self._format.bare_openers if self._bare else ())

    def _find_opener(self, *, whole: bool) -> int:
        """Where the first opener begins, or what may become one; the end if there is none."""
        text = self._pending
        first = len(text) - len(text.lstrip())
        if self._bare and text.startswith(self._format.bare_openers, first):
            return first
        found = [at for opener in self._format.openers if (at := text.find(opener)) >= 0]
        if found or whole:
            return min(found, default=len(text))
        return may_start_at(text, self._format.openers)

    def _worth_reading(self, whole: bool) -> bool:
        if whole or len(self._pending) <= _SMALL:
            return True
        overlap = max(len(closer) for closer in self._format.closers) - 1
        fresh = max(0, self._num_read - overlap)
        self._num_read = len(self._pending)
        return any(self._pending.find(closer, fresh) >= 0 for closer in self._format.closers)

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        if length:
            self._num_read = 0
        return text

    def _content(self, text: str) -> list[Event]:
        """`text`, with the white space before it, but not yet that at its end."""
        stripped = text.rstrip()
        if not stripped:
            self._space += text
            return []
        event = Content(self._space + stripped)
        self._space = text[len(stripped) :]
        self._bare = False
        return [event]

    def _calls(self, calls: list[ToolCall]) -> list[Event]:
        self._space = ""
        self._bare = True
        events: list[Event] = []
        for call in calls:
            if self._parallel or self._num_calls == 0:
                events.append(ToolCallStart(self._num_calls, self._format.new_id(), call.name))
                events.append(ToolCallArguments(self._num_calls, call.arguments))
                self._num_calls += 1
        return events
