"""Router: from a prompt's hashes to a rank, and the books that this needs.

    index      who probably holds the prompt       loads     how much each rank has in flight
    backlog    when each rank would finish it      policy    chooses by these

The coordinator and the replay bench route with this same class. Knows no clock and no peers: a
rank is a slot here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from homing.coordinator.backlog import Backlog, RankReport
from homing.coordinator.loads import RankLoads, Slot
from homing.coordinator.prefix_index import PrefixIndex
from homing.coordinator.routing import POLICIES, WORK, Match, reads_prefixes, work
from homing.prefix import routing_points

TOKENS_OF_REQUEST = 1000
"""What a request loads beside its uncached prompt tokens: its answer, of a length not yet known."""
TOKENS_FLOOR = 2048
"""Mean load in tokens under which imbalance does not grow further: one usual prefill chunk."""


class LoadUnit(StrEnum):
    """What `prefix_affinity` counts as load."""

    REQUESTS = "requests"
    TOKENS = "tokens"


class Decision(NamedTuple):
    """Where a request went; kept until it ends."""

    slot: Slot
    num_prompt_tokens: int
    predicted_cached_tokens: int
    load: int
    """What was charged."""


class Router:
    def __init__(
        self,
        *,
        policy: str,
        alpha: float,
        load_unit: LoadUnit,
        prefix_ttl_s: float,
        max_index_entries: int,
        max_requests: int,
        now: float,
    ) -> None:
        self.reads_prefixes = reads_prefixes(policy)
        self.index = PrefixIndex(ttl_s=prefix_ttl_s, max_entries=max_index_entries, now=now)
        self._in_tokens = load_unit is LoadUnit.TOKENS
        floor = TOKENS_FLOOR if self._in_tokens else 1
        self.loads = RankLoads(max_load=max_requests, floor=floor)
        self.backlog = Backlog() if policy == WORK else None
        self._policy = POLICIES.get(policy)
        self._alpha = alpha

    def open(self, slot: Slot) -> None:
        """Let a slot of the index be chosen."""
        self.loads.open(slot)
        if self.backlog:
            self.backlog.open(slot)

    def close(self, slot: Slot) -> None:
        """Its requests have ended; do not choose it again."""
        self.loads.close(slot)
        if self.backlog:
            self.backlog.close(slot)

    def route(
        self, digests: Sequence[bytes] | None, num_prompt_tokens: int, block_size: int, now: float
    ) -> Decision:
        """Choose a rank and charge it. Some rank must be available.

        `digests` are the prompt's block hashes at its routing points; None: it was not hashed.
        """
        loads, num_blocks = self.loads, num_prompt_tokens // block_size
        if digests is None or not self.reads_prefixes:
            digests, matches = (), [Match(0, loads.available)]
        else:
            matches = self.index.match(digests, routing_points(num_blocks), loads.available)
        if self.backlog:
            step, prices = self.backlog.model.times, self.backlog.prices
            slot = work(matches, num_prompt_tokens, block_size, step, prices, loads, now)
        else:
            slot = self._policy(matches, num_blocks, loads, self._alpha)
        matched = next(match.num_blocks for match in matches if match.slots >> slot & 1)
        # A fully cached prompt still computes its last token.
        cached = min(matched * block_size, num_prompt_tokens - 1)
        load = num_prompt_tokens - cached + TOKENS_OF_REQUEST if self._in_tokens else 1
        loads.charge(slot, load)
        self.index.record(digests, slot)
        if self.backlog:
            self.backlog.sent(slot, num_prompt_tokens, cached, now)
        return Decision(slot, num_prompt_tokens, cached, load)

    def end(self, decision: Decision, generated_tokens: int | None) -> None:
        """A routed request ended. `generated_tokens` is None where its answer was cut off."""
        self.loads.give_back(decision.slot, decision.load)
        if self.backlog:
            self.backlog.ended(decision.slot, decision.num_prompt_tokens, generated_tokens)

    def reported(self, slot: Slot, report: RankReport, now: float) -> None:
        """An engine told of itself."""
        if self.backlog:
            self.backlog.reported(slot, report, now)
