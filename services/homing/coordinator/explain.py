"""Why the last requests went where they went: for people, who read a few a second at most.

So a busy fleet's decisions are sampled, and cost nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from homing.coordinator.loads import RankLoads, Slot, slots_of
from homing.coordinator.routing import Match

SHOWN = 12
"""Explanations kept, and made in a second at most."""
MAX_SCORES = 8
"""Ranks told of in each: those with the best scores."""


class Score(NamedTuple):
    slot: Slot
    matched_blocks: int
    load: int
    score: float
    """Higher is better; what it means is the policy's."""


class Explanation(NamedTuple):
    at: float
    num_blocks: int
    """Full blocks of the prompt."""
    slot: Slot
    scores: list[Score]
    """Best first, the chosen one among them."""


class Explanations:
    def __init__(self, *, enabled: bool) -> None:
        self.next_at = 0.0 if enabled else float("inf")
        """When the next decision is to be explained."""
        self._last: deque[Explanation] = deque(maxlen=SHOWN)

    def add(self, at: float, num_blocks: int, slot: Slot, scores: list[Score]) -> None:
        chosen = [score for score in scores if score.slot == slot]
        others = sorted((s for s in scores if s.slot != slot), key=lambda s: -s.score)
        shown = sorted(chosen + others[: MAX_SCORES - 1], key=lambda s: -s.score)
        self._last.append(Explanation(at, num_blocks, slot, shown))
        if len(self._last) == SHOWN:
            self.next_at = self._last[0].at + 1.0

    def snapshot(self, rank_of_slot: Mapping[Slot, int], now: float) -> list[dict[str, Any]]:
        """The newest first. Ranks that are gone, and what went to them, are left out."""
        return [
            {
                "age_s": max(0.0, now - explanation.at),
                "num_blocks": explanation.num_blocks,
                "rank": rank_of_slot[explanation.slot],
                "scores": [
                    {"rank": rank_of_slot[slot], **dict(zip(_SCORE_KEYS, values, strict=True))}
                    for slot, *values in explanation.scores
                    if slot in rank_of_slot
                ],
            }
            for explanation in reversed(self._last)
            if explanation.slot in rank_of_slot
        ]


_SCORE_KEYS = ("matched_blocks", "load", "score")


def policy_scores(
    policy: str,
    matches: Sequence[Match],
    num_prompt_blocks: int,
    loads: RankLoads,
    alpha: float,
) -> list[Score]:
    """Every rank's score by a policy of `routing`, whose docstrings have the formulas."""
    weight = alpha / max(loads.floor, loads.mean)
    scores: list[Score] = []
    for match in matches:
        held = match.num_blocks / num_prompt_blocks if match.num_blocks else 0.0
        for slot in slots_of(match.slots):
            load = loads.load(slot)
            match policy:
                case "longest_prefix":
                    score = held
                case "load_balanced":
                    score = -float(load)
                case "round_robin":
                    score = -float(loads.turn(slot))
                case "first_prefix_block":
                    score = bool(match.num_blocks) - weight * (load - loads.mean)
                case _:
                    score = held - weight * (load - loads.mean)
            scores.append(Score(slot, match.num_blocks, load, score))
    return scores
