"""StepModel: how long an engine's step takes, learned from what the engines report of theirs.

    step seconds = base + prefill * prompt tokens + attention * pairs + row * decodes + kv * context

*Pairs* are the prompt tokens computed, each times the tokens before it; *context* is the sum of
what the decodes of the step attend to.

The five numbers are fitted to the mean step of each report: least squares of relative errors, in
which a report counts for less the older it is, with a weak pull to a first guess, and nothing
below zero. Sums of products are kept instead of reports, and one sweep of coordinate descent after
each report suffices, because it goes on from the last result.

Each rank also has a factor, its measured over its expected time: a slow one is known for slow
without a model of its own. While all ranks are alike only the ratios of the numbers matter for a
choice, so even the guess orders ranks well enough.
"""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from homing.coordinator.loads import Slot


class StepTimes(NamedTuple):
    """What a step costs, in seconds."""

    base: float
    """Whatever is in it."""
    prefill: float
    """Each prompt token computed."""
    attention: float
    """Each pair of a prompt token computed and a token before it."""
    row: float
    """Each request that decodes."""
    kv: float
    """Each token of context of those."""

    def prefill_s(self, num_cached: int, num_prompt_tokens: int) -> float:
        """Of the tokens `[num_cached, num_prompt_tokens)` of a prompt, without the steps' base."""
        pairs = 0.5 * (num_prompt_tokens * num_prompt_tokens - num_cached * num_cached)
        return self.prefill * (num_prompt_tokens - num_cached) + self.attention * pairs


class StepSums(NamedTuple):
    """What a rank's steps held and took together, since its process started or in an interval."""

    num_steps: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    seconds: float = 0.0

    def since(self, earlier: StepSums) -> StepSums:
        return StepSums._make(now - then for now, then in zip(self, earlier, strict=True))


GUESS = StepTimes(base=10e-3, prefill=100e-6, attention=1e-9, row=100e-6, kv=100e-9)
"""Before any report: the ratios of a dense model of some billion weights on one accelerator."""

FORGETTING = 0.998
"""What is left of a report's weight when another comes: the last five hundred count."""
GUESS_WEIGHT = 1e-5
"""What the guess weighs against one report: little, but it decides what no report tells."""
MAX_SURPRISE = 1e6
"""Steps that took so many times as long as was guessed, or as short, are not believed."""
FACTOR_SHARE = 0.1
"""Share of the newest report in a rank's factor."""
MIN_FACTOR, MAX_FACTOR = 0.1, 10.0
USUAL_FACTOR = 1.25
"""Ranks whose factor is no farther from 1 count as alike: noise must not part equal ranks."""

_NUM = len(GUESS)


class StepModel:
    def __init__(self) -> None:
        self.times = GUESS
        """Of a rank of average speed. None is negative."""
        # In units of the guess: products of what steps held and took, summed over reports.
        self._unknowns = [1.0] * _NUM
        self._held_held = [[0.0] * _NUM for _ in range(_NUM)]
        self._held_took = [0.0] * _NUM
        self._factor_of_slot: dict[Slot, float] = {}

    def factor(self, slot: Slot) -> float:
        """How many times as long this rank takes as the average one."""
        factor = self._factor_of_slot.get(slot, 1.0)
        return 1.0 if 1.0 / USUAL_FACTOR <= factor <= USUAL_FACTOR else factor

    def forget(self, slot: Slot) -> None:
        self._factor_of_slot.pop(slot, None)

    def learn(self, slot: Slot, sums: StepSums) -> None:
        """Take in what a rank's steps held and took since it last told. Odd sums teach nothing."""
        num_steps, *held, seconds = sums
        if num_steps <= 0 or seconds <= 0.0 or min(held) < 0:
            return
        counts = (num_steps, *held)
        # Divided by what was measured, so that errors are relative: the right answer is 1.
        shares = [guess * number / seconds for guess, number in zip(GUESS, counts, strict=True)]
        if not 1.0 / MAX_SURPRISE < sum(shares) < MAX_SURPRISE:
            return
        self._fit(shares)
        expected = sum(map(mul, self._unknowns, shares))
        ratio = min(max(1.0 / expected, MIN_FACTOR), MAX_FACTOR) if expected else MAX_FACTOR
        known = self._factor_of_slot.get(slot, 1.0)
        self._factor_of_slot[slot] = known + FACTOR_SHARE * (ratio - known)

    def _fit(self, shares: list[float]) -> None:
        for i, share in enumerate(shares):
            self._held_took[i] = FORGETTING * self._held_took[i] + share
            row = self._held_held[i]
            for j, other in enumerate(shares):
                row[j] = FORGETTING * row[j] + share * other
        unknowns = self._unknowns
        for i, row in enumerate(self._held_held):
            rest = sum(map(mul, row, unknowns)) - row[i] * unknowns[i]
            best = (self._held_took[i] + GUESS_WEIGHT - rest) / (row[i] + GUESS_WEIGHT)
            unknowns[i] = max(0.0, best)
        self.times = StepTimes(*map(mul, unknowns, GUESS))
