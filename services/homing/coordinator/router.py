"""RankRouter: from a prompt's hashes to a rank, and the books that this needs.

    index      who probably holds the prompt       loads     how much each rank has in flight
    backlog    when each rank would be done        policy    chooses by these

The coordinator and the replay bench route with this same class. It knows no clock and no peers: a
rank is a slot here. All that is done to it can be recorded; `recording` does the same things again
and comes to the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import astuple

from homing.coordinator.backlog import Backlog, RankReport
from homing.coordinator.explain import Explanations, policy_scores
from homing.coordinator.loads import RankLoads, Slot
from homing.coordinator.prefix_index import PrefixIndex
from homing.coordinator.routing import (
    POLICIES,
    WORK,
    Match,
    load_balanced,
    reads_prefixes,
    work,
    work_costs,
)
from homing.prefix import routing_points

TOKENS_OF_REQUEST = 1000
"""What a request loads beside its uncached prompt tokens: its answer, of a length not yet known."""
TOKENS_FLOOR = 2048
"""Mean load in tokens below which imbalance does not count for more: a usual prefill chunk."""

LoadUnit = Literal["requests", "tokens"]
Record = Callable[[list[Any]], None]
"""Takes what was done, its name first, as plain values."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    policy: str
    alpha: float
    load_unit: LoadUnit
    """What `prefix_affinity` and the other policies count as load."""
    prefix_ttl_s: float
    max_index_entries: int
    max_requests: int
    """A rank may have in flight."""
    max_tokens: int | None = None
    """Of prompts; a rank that has so many in flight takes no more. None: no bound."""


class Decision(Struct, frozen=True, gc=False):
    """Where a request went; kept until it ends."""

    number: int
    slot: Slot
    num_prompt_tokens: int
    num_cached_tokens: int
    """Predicted."""
    load: int
    """What was charged."""


class RankRouter:
    def __init__(
        self,
        config: RoutingConfig,
        *,
        now: float,
        record: Record | None = None,
        explain: bool = False,
    ) -> None:
        """`explain`: keep the reasons of some decisions, for people."""
        self.reads_prefixes = reads_prefixes(config.policy)
        self.index = PrefixIndex(
            ttl_s=config.prefix_ttl_s, max_entries=config.max_index_entries, now=now
        )
        self._in_tokens = config.load_unit == "tokens"
        floor = TOKENS_FLOOR if self._in_tokens else 1
        self.loads = RankLoads(
            max_load=config.max_requests, max_tokens=config.max_tokens, floor=floor
        )
        self.backlog = Backlog() if config.policy == WORK else None
        self.explanations = Explanations(enabled=explain)
        self._policy_name = config.policy
        self._policy = POLICIES.get(config.policy, load_balanced)  # not called for WORK
        self._alpha = config.alpha
        self._num_decisions = 0
        self._record = record

    # Ranks

    def open_slot(self) -> Slot:
        """A slot for a rank that joins."""
        slot = self.index.open_slot()
        if self._record:
            self._record(["open_slot", slot])
        return slot

    def open(self, slot: Slot) -> None:
        """Let it be chosen."""
        self.loads.open(slot)
        if self.backlog:
            self.backlog.open(slot)
        if self._record:
            self._record(["open", slot])

    def close(self, slot: Slot) -> None:
        """Its requests have ended; do not choose it again."""
        self.loads.close(slot)
        if self.backlog:
            self.backlog.close(slot)
        if self._record:
            self._record(["close", slot])

    def limit(self, slot: Slot, max_requests: int) -> None:
        """Let an open slot have so many requests from now on."""
        self.loads.limit(slot, max_requests)
        if self._record:
            self._record(["limit", slot, max_requests])

    def close_slot(self, slot: Slot) -> None:
        """The session that had this slot is over."""
        self.index.close_slot(slot)
        if self._record:
            self._record(["close_slot", slot])

    def reported(self, slot: Slot, report: RankReport, now: float) -> None:
        """An engine told of itself."""
        if self.backlog:
            self.backlog.reported(slot, report, now)
            if self._record:
                self._record(["reported", slot, [*report], now])

    # Requests

    def route(
        self, digests: bytes | None, num_prompt_tokens: int, block_size: int, now: float
    ) -> Decision:
        """Choose a rank and charge it. Some rank must be available.

        `digests` are the prompt's block hashes at its routing points, joined; None: not hashed.
        """
        loads, num_blocks = self.loads, num_prompt_tokens // block_size
        if digests is None or not self.reads_prefixes:
            digests, matches = None, [Match(0, loads.available)]
        else:
            matches = self.index.match(digests, routing_points(num_blocks), loads.available)
        if self.backlog is None:
            slot = self._policy(matches, num_blocks, loads, self._alpha)
        else:
            slot = work(*self._costs(matches, num_prompt_tokens, block_size, now), loads)
        if now >= self.explanations.next_at:
            self._explain(matches, num_prompt_tokens, block_size, slot, now)
        num_cached = 0
        for match in matches:
            if match.slots >> slot & 1:
                num_cached = match.num_blocks * block_size
                if num_cached == num_prompt_tokens:  # its last token is computed all the same
                    num_cached -= 1
                break
        load = num_prompt_tokens - num_cached + TOKENS_OF_REQUEST if self._in_tokens else 1
        self._num_decisions = number = self._num_decisions + 1
        decision = Decision(number, slot, num_prompt_tokens, num_cached, load)
        loads.charge(slot, load, num_prompt_tokens)
        if digests:
            self.index.record(digests, slot)
        if self.backlog:
            self.backlog.sent(slot, num_prompt_tokens, num_cached, now)
        if self._record:
            joined = None if digests is None else digests.hex()
            self._record(
                ["route", joined, num_prompt_tokens, block_size, now, [*astuple(decision)]]
            )
        return decision

    def _costs(
        self, matches: Sequence[Match], num_prompt_tokens: int, block_size: int, now: float
    ) -> tuple[list[Slot], list[float]]:
        """What `work` chooses by: the ranks, and the cost of each."""
        assert self.backlog is not None
        return work_costs(
            matches,
            num_prompt_tokens,
            block_size,
            self.backlog.answer_tokens,
            self.backlog.model.times,
            self.backlog.prices,
            now,
        )

    def _explain(
        self,
        matches: Sequence[Match],
        num_prompt_tokens: int,
        block_size: int,
        slot: Slot,
        now: float,
    ) -> None:
        """Keep why `slot` was chosen."""
        num_blocks = num_prompt_tokens // block_size
        scores = policy_scores(self._policy_name, matches, num_blocks, self.loads, self._alpha)
        if self.backlog:
            costs = self._costs(matches, num_prompt_tokens, block_size, now)
            cost_of = dict(zip(*costs, strict=True))
            scores = [score._replace(score=-cost_of[score.slot]) for score in scores]
        self.explanations.add(now, num_blocks, slot, scores)

    def end(self, decision: Decision, num_generated_tokens: int | None) -> None:
        """A routed request ended. The tokens are None where nobody knows how many there were."""
        self.loads.give_back(decision.slot, decision.load, decision.num_prompt_tokens)
        if self.backlog:
            self.backlog.ended(decision.slot, decision.num_prompt_tokens, num_generated_tokens)
        if self._record:
            self._record(["end", decision.number, num_generated_tokens])

    # The index

    def stored(self, slot: Slot, digests: bytes) -> None:
        """An engine holds these blocks, which are a prompt's at its routing points, joined."""
        self.index.store(digests, slot)
        if self._record:
            self._record(["stored", slot, digests.hex()])

    def dropped(self, slot: Slot, digests: bytes) -> None:
        """An engine holds these blocks no more."""
        self.index.drop(digests, slot)
        if self._record:
            self._record(["dropped", slot, digests.hex()])

    def advance(self, now: float) -> None:
        """Let time pass. Call it often."""
        self.index.advance(now)
        if self._record:
            self._record(["advance", now])

    def clear(self) -> None:
        """No rank holds anything."""
        self.index.clear()
        if self._record:
            self._record(["clear"])
