"""Models that think before they answer: `<think>thoughts</think>answer`.

Where thinking starts depends on the model's chat template: some templates open the thoughts at the
prompt's end, some open and close them there to prevent them, some leave it to the model. The end of
the rendered prompt tells which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from homing.frontend.parsers.events import Content, Event, Reasoning
from homing.frontend.parsers.marks import may_start_at


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its thoughts."""

    opener: str = "<think>"
    closer: str = "</think>"
    always: bool = False
    """The answer starts with thoughts, even where neither prompt nor answer opens them."""

    def starts_open(self, prompt_end: str) -> bool:
        """Whether an answer to the prompt with this end starts inside the thoughts."""
        end = prompt_end.rstrip()
        return end.endswith(self.opener) or (self.always and not end.endswith(self.closer))


REASONING_FORMATS = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(always=True),
    "magistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}


class _Phase(Enum):
    START = "start"  # nothing but white space yet: an opener may come
    FIRST_THOUGHT = "first thought"  # behind the opener: line ends are dropped
    THOUGHTS = "thoughts"
    FIRST_WORD = "first word"  # behind the closer: line ends are dropped
    ANSWER = "answer"


class ReasoningParser:
    """Parses one answer into reasoning and content.

    Line ends next to the marks are dropped: chat templates write them again.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, prompt_end: str = "") -> None:
        """`prompt_end`: the rendered prompt, or the end of it from before its last mark on."""
        self._format = reasoning_format
        self._opened = reasoning_format.starts_open(prompt_end)
        self._phase = _Phase.START
        self._pending = ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token is a thought: what to count, and what a budget ends."""
        return self._phase in (_Phase.FIRST_THOUGHT, _Phase.THOUGHTS) or (
            self._phase is _Phase.START and self._opened
        )

    def push(self, text: str) -> list[Event]:
        self._pending += text
        return self._parse(whole=False)

    def finish(self) -> list[Event]:
        return self._parse(whole=True)

    def _parse(self, *, whole: bool) -> list[Event]:
        if self._phase is _Phase.START:
            self._start(whole)
        events: list[Event] = []
        if self._phase in (_Phase.FIRST_THOUGHT, _Phase.THOUGHTS) and (
            thoughts := self._thoughts(whole)
        ):
            events.append(Reasoning(thoughts))
        if self._phase is _Phase.FIRST_WORD:
            self._skip_line_ends(_Phase.ANSWER)
        if self._phase is _Phase.ANSWER and (answer := self._take(len(self._pending))):
            events.append(Content(answer))
        return events

    def _start(self, whole: bool) -> None:
        text = self._pending.lstrip()
        if text.startswith(self._format.opener):
            self._pending = text.removeprefix(self._format.opener)
            self._phase = _Phase.FIRST_THOUGHT
        elif whole or not self._format.opener.startswith(text):
            self._phase = _Phase.FIRST_THOUGHT if self._opened else _Phase.ANSWER

    def _thoughts(self, whole: bool) -> str:
        """The thoughts that are certain, up to the closer; moves on behind it."""
        if self._phase is _Phase.FIRST_THOUGHT:
            self._skip_line_ends(_Phase.THOUGHTS)
        end = self._pending.find(self._format.closer)
        if end >= 0:
            thoughts = self._take(end).rstrip("\n")
            self._take(len(self._format.closer))
            self._phase = _Phase.FIRST_WORD
            return thoughts
        if whole:
            return self._take(len(self._pending))
        certain = self._pending[: may_start_at(self._pending, (self._format.closer,))]
        return self._take(len(certain.rstrip("\n")))

    def _skip_line_ends(self, then: _Phase) -> None:
        self._pending = self._pending.lstrip("\n")
        if self._pending:
            self._phase = then

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text
