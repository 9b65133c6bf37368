"""Reading answers that constrained decoding holds to `ToolChoice.output_schema`.

The grammar sees to it that they are what they should be, up to an early end, so arguments are told
as they arrive. Of an answer that was not held to it, what is no call is content.
"""

from __future__ import annotations

import re

from homing.frontend.parsers.events import Content, Event, ToolCallArguments, ToolCallStart
from homing.frontend.parsers.tool_calls import new_call_id

_HEADER = re.compile(
    r'\s*(?:\[|\}\s*,)\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
)
_END = re.compile(r"\s*\}?\s*\]?\s*")


class NamedCallParser:
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [ToolCallArguments(0, text)]
        if not self._started:
            self._started = True
            events.insert(0, ToolCallStart(0, new_call_id(), self._name))
        return events

    def finish(self) -> list[Event]:
        return []


class RequiredCallsParser:
    """The whole answer is an array of calls."""

    def __init__(self) -> None:
        self._pending = ""
        self._num_calls = 0
        self._arguments: _OpenObject | None = None  # those of the last call, until they end

    def push(self, text: str) -> list[Event]:
        self._pending += text
        events: list[Event] = []
        while self._pending:
            if self._arguments is None and not self._start_call(events):
                break
            self._pass_arguments_on(events)
        return events

    def finish(self) -> list[Event]:
        left, self._pending = self._pending, ""
        return [] if (self._num_calls and _END.fullmatch(left)) or not left else [Content(left)]

    def _start_call(self, events: list[Event]) -> bool:
        header = _HEADER.match(self._pending)
        if header is None:
            return False
        events.append(ToolCallStart(self._num_calls, new_call_id(), header[1]))
        self._num_calls += 1
        self._pending = self._pending[header.end() :]
        self._arguments = _OpenObject()
        return True

    def _pass_arguments_on(self, events: list[Event]) -> None:
        assert self._arguments is not None
        end = self._arguments.end_in(self._pending)
        fragment = self._pending[:end]
        events.append(ToolCallArguments(self._num_calls - 1, fragment))
        self._pending = self._pending[len(fragment) :]
        if end is not None:
            self._arguments = None


class _OpenObject:
    """Where an object of JSON ends that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Take the next piece; where in it the object ends, if it does."""
        for end, character in enumerate(text, start=1):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return end
        return None
