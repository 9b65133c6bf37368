"""StepModel: how long an engine's step takes, learned from what the engines report of theirs.

    step seconds = base + prefill * prompt tokens + row * decode rows + kv * their context tokens

The four numbers are fitted to the mean step of each report by recursive least squares (Ljung,
*System Identification*, 2nd ed., section 11.2) with slow forgetting. Each rank also has a factor,
its measured over its expected time: a slow one is known for slow without a model of its own.

Until reports come the numbers are a guess, which orders ranks well enough: only their ratios count
while all ranks are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from homing.coordinator.loads import Slot


class StepTimes(NamedTuple):
    """What a step costs, in seconds."""

    base: float
    """Whatever is in it."""
    prefill: float
    """Each prompt token computed."""
    row: float
    """Each request that decodes."""
    kv: float
    """Each token of context of those."""

    def times(self, factor: float) -> StepTimes:
        return StepTimes(*(factor * value for value in self))


@dataclass(frozen=True, slots=True)
class StepSums:
    """What a rank's steps held and took together, since its process started or in an interval."""

    num_steps: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    kv_tokens: int = 0
    """Sum over decode rows of their context."""
    seconds: float = 0.0

    def since(self, earlier: StepSums) -> StepSums:
        return StepSums(
            self.num_steps - earlier.num_steps,
            self.prefill_tokens - earlier.prefill_tokens,
            self.decode_rows - earlier.decode_rows,
            self.kv_tokens - earlier.kv_tokens,
            self.seconds - earlier.seconds,
        )


GUESS = StepTimes(base=10e-3, prefill=100e-6, row=100e-6, kv=100e-9)
"""Before any report: the ratios of a dense model of some billion weights on one accelerator."""

SCALES = (1.0, 1e3, 1e2, 1e6)
"""What a busy step has of each, so that the four unknowns, in seconds, are of one size."""

FORGETTING = 0.99
"""Weight of what is known when a report comes: the last hundred reports count."""
GUESS_WEIGHT = 0.01
"""What the guess weighs against one report: next to nothing, but it decides what no report says."""
MAX_VARIANCE = 1.0 / GUESS_WEIGHT
"""Nothing becomes less certain than the guess was, however long no report tells of it."""
FACTOR_SHARE = 0.1
"""Share of the newest report in a rank's factor."""
MIN_FACTOR, MAX_FACTOR = 0.1, 10.0
USUAL_FACTOR = 1.25
"""Ranks whose factor is no farther from 1 count as alike: noise must not part equal ranks."""


class StepModel:
    def __init__(self) -> None:
        self._unknowns = [value * scale for value, scale in zip(GUESS, SCALES, strict=True)]
        self._covariance = [[MAX_VARIANCE * (i == j) for j in range(4)] for i in range(4)]
        self._factor_of_slot: dict[Slot, float] = {}

    @property
    def times(self) -> StepTimes:
        """Of a rank of average speed. None is negative, prefill is more than nothing."""
        base, prefill, row, kv = (
            max(0.0, value / scale) for value, scale in zip(self._unknowns, SCALES, strict=True)
        )
        return StepTimes(base, max(prefill, 1e-9), row, kv)

    def times_of(self, slot: Slot) -> StepTimes:
        factor = self._factor_of_slot.get(slot, 1.0)
        usual = 1.0 / USUAL_FACTOR <= factor <= USUAL_FACTOR
        return self.times if usual else self.times.times(factor)

    def forget(self, slot: Slot) -> None:
        self._factor_of_slot.pop(slot, None)

    def learn(self, slot: Slot, sums: StepSums) -> None:
        """Take in what a rank's steps held and took since it last told. Odd sums teach nothing."""
        held = (sums.num_steps, sums.prefill_tokens, sums.decode_rows, sums.kv_tokens)
        if sums.num_steps <= 0 or sums.seconds <= 0.0 or min(held) < 0:
            return
        mean = [value / scale / sums.num_steps for value, scale in zip(held, SCALES, strict=True)]
        measured = sums.seconds / sums.num_steps
        self._fit(mean, measured)
        expected = _dot(self._unknowns, mean)
        if expected > 0.0:
            ratio = min(max(measured / expected, MIN_FACTOR), MAX_FACTOR)
            known = self._factor_of_slot.get(slot, 1.0)
            self._factor_of_slot[slot] = known + FACTOR_SHARE * (ratio - known)

    def _fit(self, mean: list[float], measured: float) -> None:
        """One step of recursive least squares."""
        covariance = self._covariance
        direction = [_dot(row, mean) for row in covariance]
        spread = FORGETTING + _dot(mean, direction)
        error = measured - _dot(self._unknowns, mean)
        for i in range(4):
            gain = direction[i] / spread
            self._unknowns[i] += gain * error
            for j in range(4):
                covariance[i][j] = (covariance[i][j] - gain * direction[j]) / FORGETTING
        # Forgetting what no report confirms would let its variance grow without end.
        largest = max(covariance[i][i] for i in range(4))
        if largest > MAX_VARIANCE:
            shrink = MAX_VARIANCE / largest
            self._covariance = [[shrink * value for value in row] for row in covariance]


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
