"""Log-probabilities of tokens, and how those of a prompt are gathered.

How they are computed is the business of `sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Of k positions: the chosen token's, and the n most probable tokens with theirs."""

    chosen: NDArray[np.float32]  # [k]
    top_ids: NDArray[np.uint32]  # [k, n], most probable first, ties to the lowest id
    top: NDArray[np.float32]  # [k, n]

    @classmethod
    def none(cls, num_top: int) -> LogProbs:
        """Of no position."""
        top = np.empty((0, num_top))
        return cls(np.empty(0, np.float32), top.astype(np.uint32), top.astype(np.float32))

    @property
    def num_top(self) -> int:
        return self.top_ids.shape[1]

    def row(self, index: int, num_top: int) -> LogProbs:
        """One position, with fewer alternatives."""
        rows = slice(index, index + 1)
        return LogProbs(self.chosen[rows], self.top_ids[rows, :num_top], self.top[rows, :num_top])


class PromptScores:
    """Those of one request's prompt, chunk by chunk.

    The logits of position i score token i + 1; so a prompt of n tokens has n - 1 scores.
    """

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_scored = 0  # positions [0, num_scored) have given their score
        self._num_wanted = num_prompt - 1
        self._parts = [LogProbs.none(num_top)]

    @property
    def complete(self) -> bool:
        return self.num_scored == self._num_wanted

    def positions(self, start: int, end: int) -> range:
        """Which of the positions [start, end) have a score to give that is not there yet."""
        return range(max(start, self.num_scored), min(end, self._num_wanted))

    def add(self, part: LogProbs) -> None:
        """The scores of the positions that follow."""
        self._parts.append(part)
        self.num_scored += len(part.chosen)

    def take(self) -> LogProbs:
        """All scores, once."""
        parts, self._parts = self._parts, []
        return LogProbs(
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top for part in parts]),
        )
