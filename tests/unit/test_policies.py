"""Properties of the policies besides `prefix_affinity` and of load in tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.coordinator.loads import Slot, slots_of
from homing.coordinator.router import LoadUnit, RankRouter, RoutingConfig
from homing.coordinator.routing import (
    DECODING,
    POLICIES,
    POLICY_NAMES,
    Price,
    first_prefix_block,
    longest_prefix,
    prefix_affinity,
    price,
    work,
    work_costs,
)
from homing.coordinator.step_model import StepTimes
from homing.prefix import routing_points
from tests.support.routing import loads_of, matches_of

BLOCK = 16
STEP = StepTimes(base=5e-3, prefill=50e-6, attention=1e-9, row=50e-6, kv=50e-9)


ranks = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=12
)  # of each: blocks held, requests in flight


# longest_prefix and first_prefix_block


@given(ranks)
def test_longest_prefix_takes_a_deepest_holder_and_the_least_loaded_of_those(
    ranks: list[tuple[int, int]],
) -> None:
    held, loads = zip(*ranks, strict=True)
    chosen = longest_prefix(matches_of(*held), 12, loads_of(*loads), 0.5)
    assert held[chosen] == max(held)
    assert loads[chosen] == min(load for h, load in ranks if h == max(held))


@given(ranks)
def test_longest_prefix_is_prefix_affinity_with_alpha_zero(ranks: list[tuple[int, int]]) -> None:
    held, loads = zip(*ranks, strict=True)
    matches, ranks_loads = matches_of(*held), loads_of(*loads)
    chosen = prefix_affinity(matches, 12, ranks_loads, 0.0)
    assert longest_prefix(matches, 12, ranks_loads, 0.5) == chosen


@given(ranks, st.floats(0.0, 4.0))
def test_first_prefix_block_sees_only_whether_the_first_block_is_held(
    ranks: list[tuple[int, int]], alpha: float
) -> None:
    held, loads = zip(*ranks, strict=True)
    cut = matches_of(*(min(blocks, 1) for blocks in held))
    chosen = first_prefix_block(matches_of(*held), 12, loads_of(*loads), alpha)
    assert chosen == prefix_affinity(cut, 1, loads_of(*loads), alpha)


def test_first_prefix_block_leaves_a_holder_that_is_much_busier_than_the_fleet() -> None:
    matches = matches_of(1, 0, 0)
    assert first_prefix_block(matches, 10, loads_of(3, 2, 2), 0.5) == 0
    assert first_prefix_block(matches, 10, loads_of(9, 0, 0), 0.5) == 1


@pytest.mark.parametrize("name", ["prefix_affinity", "longest_prefix", "first_prefix_block"])
def test_where_nobody_holds_anything_the_least_loaded_is_chosen(name: str) -> None:
    assert POLICIES[name](matches_of(0, 0, 0), 10, loads_of(2, 1, 3), 0.5) == 1


# work


def work_of(
    held: list[int],
    running: list[int],
    *,
    clear_in_s: list[float] | None = None,
    factors: list[float] | None = None,
    num_prompt_tokens: int = 12 * BLOCK,
) -> Slot:
    """The choice among ranks with so many blocks and requests, of 1,000 tokens of context each."""
    prices = {
        Slot(slot): price(
            (clear_in_s or [0.0] * len(held))[slot],
            num,
            1000.0 * num,
            100.0,
            STEP,
            (factors or [1.0] * len(held))[slot],
        )
        for slot, num in enumerate(running)
    }
    matches, loads = matches_of(*held), loads_of(*running)
    slots, costs = work_costs(matches, num_prompt_tokens, BLOCK, 100.0, STEP, prices, now=0.0)
    return work(slots, costs, loads)


def test_work_prefers_the_rank_that_holds_more_when_all_else_is_equal() -> None:
    assert work_of([0, 5, 12], [1, 1, 1]) == 2


def test_work_goes_to_the_least_recently_chosen_of_equal_ranks() -> None:
    assert work_of([0, 0, 0], [1, 1, 1]) == 0


def test_work_waits_for_a_holder_exactly_as_long_as_the_wait_costs_less_than_the_prefill() -> None:
    tokens = 1000 * BLOCK
    saved_s = STEP.prefill_s(0, tokens) - STEP.prefill_s(tokens - 1, tokens)
    for wait_s, chosen in ((0.999 * saved_s, 0), (1.001 * saved_s, 1)):
        slot = work_of([1000, 0], [0, 0], clear_in_s=[wait_s, 0.0], num_prompt_tokens=tokens)
        assert slot == chosen


def test_work_counts_a_prefill_once_more_for_each_request_that_it_delays() -> None:
    """Both ranks would compute the prompt: the one with fewer requests to delay is better, even
    where the other's are ended sooner."""
    assert work_of([0, 0], [4, 1], num_prompt_tokens=4096) == 1


def test_work_spares_a_slow_rank_but_uses_it_when_the_others_are_busy() -> None:
    assert work_of([0, 0], [0, 0], factors=[3.0, 1.0]) == 1
    assert work_of([0, 0], [0, 0], clear_in_s=[0.0, 9.0], factors=[3.0, 1.0]) == 0


def test_a_prompt_shorter_than_a_block_is_routed_too() -> None:
    assert work_of([0, 0], [1, 0], num_prompt_tokens=3) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 9), st.floats(0.0, 2.0)),
        min_size=1,
        max_size=20,
    )
)
def test_work_agrees_with_the_rule_as_it_is_written(
    ranks: list[tuple[int, int, float]],
) -> None:
    held, running, clear_in_s = (list(column) for column in zip(*ranks, strict=True))
    tokens = 12 * BLOCK

    def cost(slot: int) -> float:
        m, cached = running[slot], min(held[slot] * BLOCK, tokens - 1)
        prefill = STEP.prefill_s(cached, tokens)
        own_step = STEP.base + STEP.row * (m + 1) + STEP.kv * (1000 * m + tokens)
        others = m * (STEP.row + STEP.kv * tokens)
        return clear_in_s[slot] + prefill * (1 + m) + DECODING * 100 * (own_step + others)

    chosen = work_of(held, running, clear_in_s=clear_in_s)
    assert cost(chosen) == pytest.approx(min(map(cost, range(len(ranks)))), rel=1e-9)


@given(st.integers(0, 50), st.floats(0, 1e6), st.floats(1, 1e4), st.floats(0.1, 10))
def test_a_price_rises_with_requests_context_and_slowness(
    running: int, context: float, answer: float, factor: float
) -> None:
    def total(p: Price) -> float:
        return p.fixed_s + 0.1 * p.per_second

    base = total(price(0.0, running, context, answer, STEP, factor))
    assert total(price(0.0, running + 1, context, answer, STEP, factor)) > base
    assert total(price(0.0, running, context + 1e3, answer, STEP, factor)) > base
    assert total(price(0.0, running, context, answer, STEP, factor * 1.1)) > base


# Load in tokens, and the router as a whole


def router_of(policy: str, num_ranks: int, load_unit: LoadUnit = "requests") -> RankRouter:
    config = RoutingConfig(
        policy=policy,
        alpha=0.5,
        load_unit=load_unit,
        prefix_ttl_s=300.0,
        max_index_entries=10_000,
        max_requests=100,
    )
    router = RankRouter(config, now=0.0)
    for _ in range(num_ranks):
        router.open(router.open_slot())
    return router


def digests_of(name: int, num_tokens: int) -> bytes:
    """Of a prompt like no other."""
    return b"".join(b"%8d%8d" % (name, depth) for depth in routing_points(num_tokens // BLOCK))


def test_by_tokens_a_rank_with_one_long_prompt_is_busier_than_one_with_three_short_ones() -> None:
    def chosen_by(unit: LoadUnit) -> Slot:
        router = router_of("load_balanced", 2, unit)
        long = router.route(None, 20_000, BLOCK, 0.0)
        assert long.slot == 0
        for _ in range(3):
            router.loads.charge(Slot(1), 1100 if unit == "tokens" else 1)
        return router.route(None, 100, BLOCK, 0.0).slot

    assert chosen_by("requests") == 0
    assert chosen_by("tokens") == 1


def test_by_tokens_a_prompt_that_is_believed_cached_loads_less() -> None:
    router = router_of("prefix_affinity", 2, "tokens")
    first = router.route(digests_of(1, 8000), 8000, BLOCK, 0.0)
    second = router.route(digests_of(1, 8000), 8000, BLOCK, 0.0)
    assert first.load == 8000 + 1000
    assert second.slot != first.slot, "one long prompt outweighs the hit"
    router.end(first, 10)
    router.end(second, 10)
    third = router.route(digests_of(1, 8000), 8000, BLOCK, 0.0)
    assert third.load == 1 + 1000


@pytest.mark.parametrize("unit", ["requests", "tokens"])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_load_is_given_back(policy: str, unit: LoadUnit) -> None:
    router = router_of(policy, 4, unit)
    decisions = [
        router.route(digests_of(n % 5, 100 * n), 100 * n, BLOCK, 0.1 * n) for n in range(1, 60)
    ]
    assert router.loads.total > 0
    for decision in decisions:
        router.end(decision, decision.number % 3 or None)
    assert router.loads.total == 0
    for slot in slots_of(0b1111):
        router.close(slot)
        router.close_slot(slot)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_ranks_at_their_limit_are_not_chosen(policy: str) -> None:
    router = router_of(policy, 2)
    for _ in range(100):
        router.loads.charge(Slot(0))
    assert router.route(digests_of(1, 640), 640, BLOCK, 0.0).slot == 1


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_that_was_not_hashed_goes_by_load_and_is_not_remembered(policy: str) -> None:
    router = router_of(policy, 2)
    assert router.route(None, 640, BLOCK, 0.0).slot != router.route(None, 640, BLOCK, 0.0).slot
    assert router.index.num_entries == 0


@pytest.mark.parametrize("policy", ["prefix_affinity", "longest_prefix", "work"])
def test_a_repeated_prompt_goes_back_and_one_token_is_expected_to_be_computed(policy: str) -> None:
    router = router_of(policy, 3)
    first = router.route(digests_of(1, 640), 640, BLOCK, 0.0)
    router.end(first, 10)
    router.route(digests_of(2, 64), 64, BLOCK, 10.0)
    again = router.route(digests_of(1, 640), 640, BLOCK, 10.0)
    assert (again.slot, again.num_cached_tokens) == (first.slot, 639)
