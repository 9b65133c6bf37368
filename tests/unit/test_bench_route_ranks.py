"""Simulated ranks keep time and cache as they say they do."""

from __future__ import annotations

import random

import pytest

from homing.bench.replay.block_cache import BlockCache
from homing.bench.replay.ranks import CHUNK_TOKENS, Job, SimulatedRank, StepCost
from homing.bench.replay.workload import Turn
from homing.coordinator.loads import Slot
from homing.coordinator.router import Decision

BLOCK = 64
COST = StepCost()
DECISION = Decision(1, Slot(0), 1, 0, 1)


def job(turn: Turn, arrived: float = 0.0) -> Job:
    return Job(turn, (0, 0), DECISION, arrived)


def rank_of(kv_tokens: int = 100_000) -> SimulatedRank:
    return SimulatedRank(kv_tokens, BLOCK, COST)


def finish_all(rank: SimulatedRank) -> list[Job]:
    finished: list[Job] = []
    while rank.step is not None:
        finished += rank.end_step()
    return finished


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    rank, lone = rank_of(), job(Turn(3000, 4, range(46)))
    rank.submit(lone, 0.0)
    assert finish_all(rank) == [lone]
    first, second = CHUNK_TOKENS, 3000 - CHUNK_TOKENS
    prefill_s = 2 * COST.base + 3000 * COST.prefill + 3000**2 / 2 * COST.attention
    assert first + second == 3000
    assert lone.first_token == pytest.approx(prefill_s)
    decode_s = 3 * (COST.base + COST.row) + COST.kv * (3001 + 3002 + 3003)
    assert lone.finished == pytest.approx(prefill_s + decode_s)


def test_a_repeated_prompt_computes_what_fills_no_block_and_at_least_one_token() -> None:
    for tokens, computed in ((1000, 1000 % BLOCK), (1024, 1)):
        rank = rank_of()
        first, second = (job(Turn(tokens, 1, range(tokens // BLOCK))) for _ in range(2))
        rank.submit(first, 0.0)
        finish_all(rank)
        rank.submit(second, first.finished)
        finish_all(rank)
        assert (first.num_cached, second.num_cached) == (0, tokens - computed)


def test_the_answer_is_cached_for_the_turn_that_repeats_it() -> None:
    rank = rank_of()
    turn = Turn(128, 100, [1, 2], answer_ids=[3])
    rank.submit(job(turn), 0.0)
    [first] = finish_all(rank)
    rank.submit(after := job(Turn(300, 1, [1, 2, 3, 4])), first.finished)
    finish_all(rank)
    assert after.num_cached == 3 * BLOCK


def test_siblings_that_arrive_together_compute_their_prompt_once() -> None:
    rank = rank_of()
    siblings = [job(Turn(1024, 50, range(16))) for _ in range(8)]
    for sibling in siblings:
        rank.submit(sibling, 0.0)
    finish_all(rank)
    assert [s.num_cached for s in siblings] == [0] + [1023] * 7


def test_a_rank_full_of_running_requests_lets_the_next_wait() -> None:
    rank = rank_of(kv_tokens=1024)
    one, other = job(Turn(600, 100, [1] * 0)), job(Turn(600, 100, []))
    rank.submit(one, 0.0)
    rank.submit(other, 0.0)
    assert finish_all(rank) == [one, other]
    assert other.first_token > one.finished


def test_runs_of_decodes_that_arrivals_cut_take_as_long_as_single_steps() -> None:
    """Whoever arrives during a run is taken up at the end of the step under way."""
    rank, slow = rank_of(), job(Turn(100, 1000, []))
    rank.submit(slow, 0.0)
    rank.end_step()
    assert rank.step is not None
    assert rank.step.num_steps == 999
    started = rank.step.started
    rank.submit(fast := job(Turn(10, 1, [])), started + 1.0)
    assert rank.step.num_steps < 999
    assert 0.0 <= rank.step.ends - (started + 1.0) < 0.007
    finish_all(rank)
    context = sum(range(101, 100 + 1000))
    alone_s = 1000 * COST.base + 999 * COST.row + COST.kv * context
    prefill_s = 110 * COST.prefill + (100**2 + 10**2) / 2 * COST.attention
    assert slow.finished == pytest.approx(alone_s + prefill_s)
    assert fast.finished < slow.finished


def test_a_report_tells_what_the_finished_steps_held_and_took() -> None:
    rank = rank_of()
    rank.submit(job(Turn(3000, 4, [])), 0.0)
    assert rank.report().owed_tokens == 3000
    rank.end_step()
    assert rank.report().owed_tokens == 3000 - CHUNK_TOKENS
    finish_all(rank)
    sums = rank.report().steps
    assert sums[:5] == (5, 3000, 3000**2 / 2, 3, 3001 + 3002 + 3003)
    assert sums.seconds == pytest.approx(rank.busy_s)
    assert rank.report().num_requests == rank.report().owed_tokens == 0


def test_a_slow_rank_takes_as_many_times_as_long() -> None:
    usual, slow = SimulatedRank(9999, BLOCK, COST), SimulatedRank(9999, BLOCK, COST, slowness=3.0)
    for rank in (usual, slow):
        rank.submit(job(Turn(3000, 40, [])), 0.0)
        finish_all(rank)
    assert slow.busy_s == pytest.approx(3 * usual.busy_s)


# The cache


def test_blocks_go_in_the_order_they_were_let_go_and_leaves_before_their_prefix() -> None:
    cache = BlockCache(10 * BLOCK, BLOCK)
    for blocks in ([1, 2, 3], [1, 2, 4]):
        num_cached = cache.match(blocks)
        assert cache.reserve(blocks[:num_cached], (3 - num_cached) * BLOCK)
        cache.publish(blocks[num_cached:])
        cache.release(blocks, 0)
    assert cache.match([1, 2, 3]) == cache.match([1, 2, 4]) == 3
    assert cache.reserve([], 7 * BLOCK), "one block must go: 3 was let go first"
    assert (cache.match([1, 2, 3]), cache.match([1, 2, 4])) == (2, 3)
    cache.release([], 7 * BLOCK)
    assert cache.reserve([], 8 * BLOCK)
    assert cache.match([1, 2, 4]) == 2, "then 4, before the prefix that it needs"


def test_whatever_ranks_do_the_cache_holds_no_more_than_it_can_and_ends_empty_handed() -> None:
    rng = random.Random(9)
    rank = rank_of(kv_tokens=6000)
    now, sent, finished = 0.0, 0, 0
    for _ in range(3000):
        if rng.random() < 0.4:
            system = rng.randrange(4)
            num_blocks = rng.randint(1, 30)
            ids = [system * 1000 + i for i in range(num_blocks)]
            turn = Turn(num_blocks * BLOCK + rng.randint(0, 40), rng.randint(1, 200), ids)
            rank.submit(job(turn), now)
            sent += 1
        elif rank.step is not None:
            now = max(now, rank.step.ends)
            finished += len(rank.end_step())
        assert rank._cache.num_held_tokens <= 6000
    finished += len(finish_all(rank))
    assert sent == finished
    assert rank._cache.is_idle
    assert rank.report().num_requests == rank.report().owed_tokens == 0
