"""What routing itself costs: microseconds of a decision, bytes of an entry of the prefix index."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

from homing.coordinator.loads import Slot
from homing.coordinator.prefix_index import PrefixIndex
from homing.coordinator.router import RankRouter, RoutingConfig
from homing.prefix import DIGEST_BYTES, routing_points

BLOCK_TOKENS = 16
NUM_PREFIXES, NUM_HOLDERS = 64, 8
BATCH, NUM_BATCHES = 4, 250


@dataclass(frozen=True)
class DecisionCost:
    policy: str
    ranks: int
    prompt_tokens: int
    routing_points: int
    known_us: float
    """Of a prompt of which eight ranks hold different shares."""
    fresh_us: float
    """Of a prompt that nobody holds."""


def decision_cost(
    label: str, routing: RoutingConfig, num_ranks: int, num_prompt_tokens: int
) -> DecisionCost:
    """Look-up, choice, charge and entry into the index, per prompt: the best batch's mean.

    The best one, because on a shared machine the others tell of its other users.
    """
    router, rng = RankRouter(routing, now=0.0), random.Random(7)
    for _ in range(num_ranks):
        router.open(router.open_slot())
    points = routing_points(num_prompt_tokens // BLOCK_TOKENS)
    known = [_digests(rng, len(points)) for _ in range(NUM_PREFIXES)]
    for digests in known:
        for _ in range(NUM_HOLDERS):
            num_held = rng.randint(1, len(points))
            router.index.record(digests[: num_held * DIGEST_BYTES], Slot(rng.randrange(num_ranks)))

    def best_us(prompts: Iterator[bytes]) -> float:
        best = float("inf")
        for _ in range(NUM_BATCHES):
            batch = [next(prompts) for _ in range(BATCH)]
            started = time.perf_counter()
            decisions = [router.route(d, num_prompt_tokens, BLOCK_TOKENS, 0.0) for d in batch]
            best = min(best, time.perf_counter() - started)
            for decision in decisions[::2]:  # the others stay, so that loads differ
                router.end(decision, 100)
        return 1e6 * best / BATCH

    return DecisionCost(
        policy=label,
        ranks=num_ranks,
        prompt_tokens=num_prompt_tokens,
        routing_points=len(points),
        fresh_us=best_us(_digests(rng, len(points)) for _ in iter(int, 1)),
        known_us=best_us(rng.choice(known) for _ in iter(int, 1)),
    )


@dataclass(frozen=True)
class IndexCost:
    ranks: int
    points_per_prompt: int
    entries: int
    bytes_per_entry: float
    refreshes: int
    """How often all entries were sent again, each time to another rank."""
    refreshed_entries: int
    """Those in both generations count twice."""
    refreshed_bytes_per_entry: float


def index_cost(
    num_entries: int, num_ranks: int, num_refreshes: int, points_per_prompt: int
) -> IndexCost:
    """Memory of an index filled to `num_entries`, and of one refreshed over and over.

    Prompts of one point have nothing that the index could hold as one: the most bytes an entry.

    The refreshed one holds half as many blocks, which both generations then have: it is as full.
    """
    tracemalloc.start()
    try:
        filled = _filled_index(num_entries, num_ranks, 0, points_per_prompt)
        filled_entries, filled_bytes = filled.num_entries, tracemalloc.get_traced_memory()[0]
        del filled
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        refreshed = _filled_index(num_entries // 2, num_ranks, num_refreshes, points_per_prompt)
        refreshed_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return IndexCost(
        ranks=num_ranks,
        points_per_prompt=points_per_prompt,
        entries=filled_entries,
        bytes_per_entry=filled_bytes / filled_entries,
        refreshes=num_refreshes,
        refreshed_entries=refreshed.num_entries,
        refreshed_bytes_per_entry=refreshed_bytes / refreshed.num_entries,
    )


def _filled_index(
    num_blocks: int, num_ranks: int, num_refreshes: int, points_per_prompt: int
) -> PrefixIndex:
    """An index that was sent the same prompts again and again."""
    index = PrefixIndex(ttl_s=300.0, max_entries=4 * num_blocks, now=0.0)
    for turn in range(1 + num_refreshes):
        for number, first in enumerate(range(0, num_blocks, points_per_prompt)):
            names = range(first, min(first + points_per_prompt, num_blocks))
            digests = b"".join(name.to_bytes(DIGEST_BYTES, "little") for name in names)
            index.record(digests, Slot((number + turn) % num_ranks))
        if turn < num_refreshes:
            index.advance(150.0 * (1 + turn))
    for _ in range(1000):  # what was dropped is taken apart in passing
        index.advance(150.0 * num_refreshes)
    return index


def _digests(rng: random.Random, count: int) -> bytes:
    return rng.randbytes(DIGEST_BYTES * count)
