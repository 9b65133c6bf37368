"""Backlog: what each rank still has to do and how long that takes, the books behind policy `work`.

Two sources keep it: the coordinator's own dispatches and ends, at once, and the engines' reports,
which say what prefill a rank owes and how long its steps took. Between reports what a rank owes is
taken to shrink at the pace of the step model: all that is stored is when it will be cleared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from homing.coordinator.loads import Slot
from homing.coordinator.routing import Price, price
from homing.coordinator.step_model import StepModel, StepSums

GUESSED_ANSWER_TOKENS = 256.0
ANSWER_SHARE = 0.01
"""Share of the newest answer in the mean length: the last hundred count."""
MAX_UNSEEN = 64
"""Dispatches remembered of each rank, in case its next report does not know of them yet."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What an engine says of itself in a heartbeat."""

    num_requests: int
    """Running and waiting."""
    owed_tokens: int
    """Prompt tokens yet to compute."""
    steps: StepSums
    """Since its process started."""


@dataclass(slots=True)
class _RankWork:
    clear_at: float = 0.0
    num_requests: int = 0
    prompt_tokens: int = 0
    """Of the requests in flight."""
    recent: deque[int] = field(default_factory=lambda: deque[int](maxlen=MAX_UNSEEN))
    """Uncached tokens of the last dispatches."""
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

    def sent(self, slot: Slot, prompt_tokens: int, uncached_tokens: int, now: float) -> None:
        work = self._work_of_slot[slot]
        work.num_requests += 1
        work.prompt_tokens += prompt_tokens
        work.recent.append(uncached_tokens)
        seconds = uncached_tokens * self.model.times_of(slot).prefill
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
        num_unseen = min(max(0, work.num_requests - report.num_requests), len(work.recent))
        unseen = sum(work.recent[-1 - i] for i in range(num_unseen))
        owed_s = (report.owed_tokens + unseen) * self.model.times_of(slot).prefill
        work.clear_at = now + owed_s
        self._set_price(slot)

    def _set_price(self, slot: Slot) -> None:
        work = self._work_of_slot[slot]
        context = work.prompt_tokens + 0.5 * self.answer_tokens * work.num_requests
        step = self.model.times_of(slot)
        self.prices[slot] = price(
            work.clear_at, work.num_requests, context, self.answer_tokens, step
        )
