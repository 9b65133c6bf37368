"""Backlog: what each rank still has to do and how long that takes, the books behind policy `work`.

Two sources keep it: the coordinator's own dispatches and ends, at once, and the engines' reports,
which say what prefill a rank owes and how long its steps took. Between reports what a rank owes is
taken to shrink at the pace of the step model: all that is stored is when it will be cleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from homing.coordinator.loads import Slot
from homing.coordinator.routing import Price, price
from homing.coordinator.step_model import StepModel, StepSums

GUESSED_ANSWER_TOKENS = 256.0
ANSWER_SHARE = 0.01
"""Share of the newest answer in the mean length: the last hundred count."""
MAX_RECENT = 64
"""Dispatches remembered of each rank, to know how long what it owes will take."""


class RankReport(NamedTuple):
    """What an engine says of itself in a heartbeat."""

    num_requests: int
    """Running and waiting."""
    owed_tokens: int
    """Prompt tokens yet to compute."""
    steps: StepSums
    """Since its process started."""


class Prefill(NamedTuple):
    """What a dispatched request asked a rank to compute, by what the index said."""

    num_tokens: int
    seconds: float


@dataclass(slots=True)
class _RankWork:
    clear_at: float = 0.0
    num_requests: int = 0
    prompt_tokens: int = 0
    """Of the requests in flight."""
    recent: deque[Prefill] = field(default_factory=lambda: deque[Prefill](maxlen=MAX_RECENT))
    """The last dispatches, newest first."""
    steps: StepSums | None = None
    """As last reported."""


class Backlog:
    def __init__(self) -> None:
        self.model = StepModel()
        self.answer_tokens = GUESSED_ANSWER_TOKENS
        """Running mean of what requests generate."""
        self.prices: dict[Slot, Price] = {}
        self._work_of_slot: dict[Slot, _RankWork] = {}

    def open(self, slot: Slot) -> None:
        """A rank starts, with nothing to do."""
        self._work_of_slot[slot] = _RankWork()
        self._set_price(slot)

    def close(self, slot: Slot) -> None:
        """A rank is gone, and all that it had to do."""
        del self._work_of_slot[slot], self.prices[slot]
        self.model.forget(slot)

    def sent(self, slot: Slot, num_prompt_tokens: int, num_cached: int, now: float) -> None:
        """A request was dispatched, of whose prompt the rank is believed to hold `num_cached`."""
        work = self._work_of_slot[slot]
        work.num_requests += 1
        work.prompt_tokens += num_prompt_tokens
        seconds = self.model.times.prefill_s(num_cached, num_prompt_tokens)
        seconds *= self.model.factor(slot)
        work.recent.appendleft(Prefill(num_prompt_tokens - num_cached, seconds))
        work.clear_at = max(work.clear_at, now) + seconds
        self._set_price(slot)

    def ended(self, slot: Slot, prompt_tokens: int, generated_tokens: int | None) -> None:
        """A request ended. `generated_tokens` is None where its answer was cut off."""
        work = self._work_of_slot[slot]
        work.num_requests -= 1
        work.prompt_tokens -= prompt_tokens
        if generated_tokens is not None:
            self.answer_tokens += ANSWER_SHARE * (generated_tokens - self.answer_tokens)
        self._set_price(slot)

    def reported(self, slot: Slot, report: RankReport, now: float) -> None:
        """Believe the rank's word of what it owes, and add what was sent since it spoke.

        Ends come in the order in which the rank sent them, so the requests that it does not count
        are those still on their way to it: the last ones.
        """
        work = self._work_of_slot[slot]
        if work.steps is not None:
            self.model.learn(slot, report.steps.since(work.steps))
        work.steps = report.steps
        num_unseen = max(0, work.num_requests - report.num_requests)
        unseen = sum(prefill.num_tokens for prefill in islice(work.recent, num_unseen))
        work.clear_at = now + _seconds_of_last(report.owed_tokens + unseen, work.recent)
        self._set_price(slot)

    def _set_price(self, slot: Slot) -> None:
        work = self._work_of_slot[slot]
        context = work.prompt_tokens + 0.5 * self.answer_tokens * work.num_requests
        self.prices[slot] = price(
            work.clear_at,
            work.num_requests,
            context,
            self.answer_tokens,
            self.model.times,
            self.model.factor(slot),
        )


def _seconds_of_last(num_tokens: int, recent: Iterable[Prefill]) -> float:
    """How long the last so many prompt tokens take that were sent to a rank.

    Of requests that are partly computed, and of tokens that were believed to be cached and were
    not, a token counts for as much as the others of its request.
    """
    seconds, left, pace = 0.0, num_tokens, 0.0
    for prefill in recent:
        if left <= 0:
            break
        pace = prefill.seconds / prefill.num_tokens
        seconds += pace * min(left, prefill.num_tokens)
        left -= prefill.num_tokens
    return seconds + pace * max(0, left)
