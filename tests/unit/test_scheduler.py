"""The scheduler alone: which chunks a step gets, driven without a model."""

from __future__ import annotations

import numpy as np
import pytest

from homing.engine.block_pool import BlockPool
from homing.engine.plan import StepPlan
from homing.engine.request import Change, Phase, Request
from homing.engine.scheduler import MAX_PASSES, Scheduler, SchedulerLimits, share_budget
from homing.params import SamplingParams

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 101, max_batch: int = 8, max_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), BLOCK_SIZE, SchedulerLimits(max_batch, max_tokens))


def make_request(
    name: str, num_tokens: int, *, first_token: int = 0, max_new: int = 100, **params: object
) -> Request:
    """Prompts with different `first_token` share no prefix."""
    prompt = np.arange(num_tokens, dtype=np.int32) + 1000 * first_token
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(name, prompt, sampling, seed=0, block_size=BLOCK_SIZE, max_new_tokens=max_new)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step as the engine does, with token 7 always sampled. Returns tokens by request."""
    plan = scheduler.schedule()
    run(scheduler, plan)
    scheduler.check()
    return {str(c.request.key): c.end - c.start for c in plan.chunks}


def run(scheduler: Scheduler, plan: StepPlan) -> None:
    for chunk in plan.chunks:
        scheduler.computed(chunk)
        if chunk.samples:
            chunk.request.append(7)
            if chunk.request.phase is Phase.PREFILL:
                chunk.request.change(Change.SAMPLE)


def test_an_idle_scheduler_plans_nothing():
    assert step(make_scheduler()) == {}


def test_a_prompt_is_computed_in_one_step_and_then_decodes_a_token_a_step():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 10))
    assert [step(scheduler) for _ in range(3)] == [{"a": 10}, {"a": 1}, {"a": 1}]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler = make_scheduler(max_tokens=16, max_batch=4)
    add(scheduler, make_request("a", 40))
    assert [step(scheduler) for _ in range(4)] == [{"a": 16}, {"a": 16}, {"a": 8}, {"a": 1}]


def test_decodes_come_first_and_prefill_takes_what_is_left():
    scheduler = make_scheduler(max_tokens=16, max_batch=4)
    add(scheduler, make_request("a", 4, first_token=1), make_request("b", 4, first_token=2))
    step(scheduler)
    add(scheduler, make_request("c", 40, first_token=3))
    assert step(scheduler) == {"a": 1, "b": 1, "c": 14}


def test_a_request_that_joins_running_decodes_gets_its_token_in_the_next_step():
    scheduler = make_scheduler(max_tokens=32, max_batch=17, num_blocks=200)
    add(scheduler, *(make_request(f"r{i}", 4, first_token=i) for i in range(16)))
    for _ in range(3):
        step(scheduler)
    assert all(request.phase is Phase.DECODE for request in scheduler.running)
    late = make_request("late", 12, first_token=99)
    add(scheduler, late)
    assert step(scheduler)["late"] == 12
    assert late.num_generated == 1


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one():
    scheduler = make_scheduler(max_tokens=16, max_batch=4, num_blocks=1000)
    long, short = make_request("long", 2000), make_request("short", 10, first_token=1)
    add(scheduler, long)
    step(scheduler)
    add(scheduler, short)
    assert step(scheduler) == {"long": 8, "short": 8}
    assert step(scheduler) == {"long": 14, "short": 2}
    assert short.num_generated == 1


def test_no_more_requests_run_than_the_batch_holds():
    scheduler = make_scheduler(max_batch=2)
    add(scheduler, *(make_request(f"r{i}", 4, first_token=i) for i in range(5)))
    assert set(step(scheduler)) == {"r0", "r1"}
    assert len(scheduler.waiting) == 3


def test_nothing_runs_while_paused_and_everything_is_kept():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 4))
    step(scheduler)
    scheduler.paused = True
    add(scheduler, make_request("b", 4, first_token=1))
    assert step(scheduler) == {}
    scheduler.paused = False
    assert step(scheduler) == {"a": 1, "b": 4}


# Preemption


def test_the_newest_request_is_preempted_when_blocks_run_out():
    scheduler = make_scheduler(num_blocks=7)
    old, new = make_request("old", 8, first_token=1), make_request("new", 8, first_token=2)
    add(scheduler, old, new)
    step(scheduler)
    for _ in range(4):
        step(scheduler)
    assert (old.phase, new.phase) == (Phase.DECODE, Phase.DECODE)
    assert step(scheduler) == {"old": 1}
    assert (old.phase, new.phase) == (Phase.DECODE, Phase.WAITING)
    assert scheduler.num_preemptions == 1


def test_a_preempted_request_is_computed_again_with_the_tokens_that_it_generated():
    scheduler = make_scheduler(num_blocks=7)
    old, new = make_request("old", 8, first_token=1), make_request("new", 8, first_token=2)
    add(scheduler, old, new)
    for _ in range(6):
        step(scheduler)
    assert new.num_generated == 5
    scheduler.finish(old)
    # Of its 13 tokens 8 are still in the cache: its last full block went to the older request.
    assert step(scheduler) == {"new": 5}
    assert new.num_cached == 8
    assert new.phase is Phase.DECODE
    assert new.num_generated == 6


def test_a_preempted_request_goes_before_younger_ones():
    scheduler = make_scheduler(num_blocks=7, max_batch=2)
    old, new = make_request("old", 8, first_token=1), make_request("new", 8, first_token=2)
    add(scheduler, old, new, make_request("youngest", 4, first_token=3))
    for _ in range(6):
        step(scheduler)
    assert [request.key for request in scheduler.waiting] == ["new", "youngest"]


def test_the_oldest_request_advances_however_small_the_pool_is():
    scheduler = make_scheduler(num_blocks=6, max_batch=4)
    requests = [make_request(f"r{i}", 4, first_token=i, max_new=16) for i in range(4)]
    add(scheduler, *requests)
    for _ in range(16):
        oldest = min(scheduler.running or requests, key=lambda r: r.arrival)
        before = oldest.num_tokens
        step(scheduler)
        assert oldest.num_tokens == before + 1


def test_a_large_request_that_does_not_fit_is_passed_but_not_for_ever():
    scheduler = make_scheduler(num_blocks=60, max_batch=4, max_tokens=64)
    holder = make_request("holder", 12, first_token=1)
    large = make_request("large", 57 * BLOCK_SIZE, first_token=2)
    add(scheduler, holder)
    step(scheduler)
    add(scheduler, large)
    for i in range(MAX_PASSES + 5):
        small = make_request(f"small{i}", 4, first_token=3 + i)
        add(scheduler, small)
        step(scheduler)
        if small.phase is Phase.WAITING:
            break
        scheduler.finish(small)
    assert large.num_passes == MAX_PASSES
    scheduler.finish(holder)
    step(scheduler)
    assert large.phase is Phase.PREFILL


# Prefixes


def test_a_prompt_in_the_cache_is_not_computed_again():
    scheduler = make_scheduler()
    first = make_request("first", 10)
    add(scheduler, first)
    step(scheduler)
    scheduler.finish(first)
    add(scheduler, make_request("second", 10))
    assert step(scheduler) == {"second": 2}


def test_a_fully_cached_prompt_computes_one_token():
    scheduler = make_scheduler()
    first, second = make_request("first", 12), make_request("second", 12)
    add(scheduler, first)
    step(scheduler)
    add(scheduler, second)
    assert step(scheduler) == {"first": 1, "second": 1}
    assert second.num_cached_at_start == 11
    assert second.blocks.tolist() == first.blocks.tolist()[:3]


def test_generated_tokens_are_found_in_the_cache_as_prompts_are():
    scheduler = make_scheduler()
    first = make_request("first", 6)
    add(scheduler, first)
    for _ in range(7):
        step(scheduler)
    scheduler.finish(first)
    answer = first.tokens.copy()
    second = Request(
        "second", answer, SamplingParams(), seed=0, block_size=BLOCK_SIZE, max_new_tokens=1
    )
    add(scheduler, second)
    assert step(scheduler) == {"second": 1}
    assert second.num_cached_at_start == 12


def test_requests_with_the_same_prefix_wait_for_the_first_of_them():
    scheduler = make_scheduler(max_tokens=8)
    requests = [make_request(f"r{i}", 17) for i in range(3)]
    add(scheduler, *requests)
    assert step(scheduler) == {"r0": 8}
    assert step(scheduler) == {"r0": 8}
    assert step(scheduler) == {"r0": 1, "r1": 1, "r2": 1}
    assert [r.num_cached_at_start for r in requests] == [0, 16, 16]


def test_other_requests_pass_those_that_wait_for_a_prefix():
    scheduler = make_scheduler(max_tokens=64)
    add(scheduler, make_request("a", 16), make_request("b", 16))
    add(scheduler, make_request("other", 5, first_token=1))
    assert step(scheduler) == {"a": 16, "other": 5}


def test_who_waits_for_a_prefix_goes_on_when_its_owner_is_gone():
    scheduler = make_scheduler(max_tokens=8)
    owner, heir = make_request("owner", 16), make_request("heir", 16)
    add(scheduler, owner, heir)
    step(scheduler)
    scheduler.finish(owner)
    assert step(scheduler) == {"heir": 8}
    assert heir.num_cached_at_start == 8


def test_a_short_prompt_does_not_wait_for_a_long_one_that_stands_still():
    """The oldest takes the whole budget, so the owner of the common prefix does not advance."""
    scheduler = make_scheduler(max_tokens=16, max_batch=4, num_blocks=200)
    oldest, owner = make_request("oldest", 200, first_token=1), make_request("owner", 160)
    add(scheduler, oldest, owner, make_request("short", 8))
    assert step(scheduler) == {"oldest": 16}
    assert step(scheduler) == {"oldest": 8, "short": 8}


def test_a_block_is_in_the_index_only_once_it_is_computed():
    scheduler = make_scheduler()
    request = make_request("a", 9)
    add(scheduler, request)
    plan = scheduler.schedule()
    assert not any(h in scheduler._pool for h in request.hashes)
    run(scheduler, plan)
    assert all(h in scheduler._pool for h in request.hashes)


def test_a_cleared_prefix_cache_is_not_filled_by_what_was_running():
    scheduler = make_scheduler()
    request = make_request("a", 9)
    add(scheduler, request)
    step(scheduler)
    assert scheduler.clear_prefix_cache() == 2
    for _ in range(8):
        step(scheduler)
    scheduler.finish(request)
    scheduler.check()
    assert scheduler._pool.num_cached == 0


def test_prompt_log_probs_give_up_the_prefix_hit():
    scheduler = make_scheduler()
    params = {"return_log_probs": True, "skip_prompt_log_probs": False}
    first, second = make_request("first", 12, **params), make_request("second", 12, **params)
    add(scheduler, first)
    plan = scheduler.schedule()
    assert plan.chunks[0].scored == range(11)
    run(scheduler, plan)
    add(scheduler, second)
    plan = scheduler.schedule()
    assert [c.end - c.start for c in plan.chunks] == [1, 12]
    assert second.blocks.tolist() == first.blocks.tolist()[:3]  # the memory is shared even so


# Abort


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_a_request_that_ends_in_any_phase_returns_all_its_blocks(num_steps: int):
    """Waiting, half prefilled, decoding, and decoding in another block."""
    scheduler = make_scheduler(max_tokens=8)
    request = make_request("a", 20)
    add(scheduler, request)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.finish(request)
    scheduler.check()
    assert scheduler._pool.num_held == 0
    assert (scheduler.running, scheduler.waiting) == ([], [])
    assert request.phase is Phase.FINISHED


def test_a_preempted_request_can_end():
    scheduler = make_scheduler(num_blocks=7)
    old, new = make_request("old", 8, first_token=1), make_request("new", 8, first_token=2)
    add(scheduler, old, new)
    for _ in range(6):
        step(scheduler)
    assert new.phase is Phase.WAITING
    scheduler.finish(new)
    scheduler.finish(old)
    assert scheduler._pool.num_held == 0


# The shares of a step


@pytest.mark.parametrize(
    ("owed", "budget", "shares"),
    [
        ([5], 8, [5]),
        ([20], 8, [8]),
        ([6, 6, 6], 8, [6, 2, 0]),  # about one length: one after the other
        ([20, 6], 8, [4, 4]),  # the long one leaves half of it
        ([20, 3], 8, [5, 3]),  # and takes what is not needed
        ([100, 9, 2], 8, [4, 2, 2]),  # the shortest first
        ([100, 60, 2], 8, [6, 0, 2]),  # 60 is not short beside 100
        ([100, 2], 1, [1, 0]),  # the oldest always advances
        ([2, 100], 8, [2, 6]),
    ],
)
def test_share_budget(owed: list[int], budget: int, shares: list[int]):
    assert share_budget(owed, budget) == shares
