"""The routing policies, each clause of the rule on its own."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.coordinator.loads import RankLoads, Slot, slots_of
from homing.coordinator.routing import (
    POLICIES,
    Match,
    load_balanced,
    prefix_affinity,
    reads_prefixes,
    round_robin,
)
from tests.support.routing import loads_of, matches_of


def test_alpha_zero_is_pure_affinity() -> None:
    assert prefix_affinity(matches_of(1, 0), 10, loads_of(500, 0), 0.0) == 0


def test_at_alpha_one_a_single_request_of_imbalance_across_two_ranks_cancels_a_full_hit() -> None:
    """The scores are then equal, and the tie goes to the least loaded."""
    assert prefix_affinity(matches_of(10, 0), 10, loads_of(1, 0), 1.0) == 1
    assert prefix_affinity(matches_of(10, 0), 10, loads_of(1, 0), 0.99) == 0


def test_the_cancelling_is_exact_across_three_ranks_too() -> None:
    """Means such as 1/3 are not exact in binary: the rule must not depend on their rounding."""
    assert prefix_affinity(matches_of(10, 0, 0), 10, loads_of(1, 0, 0), 1.0) == 1


def test_mild_imbalance_does_not_overturn_a_hit_at_the_default() -> None:
    assert prefix_affinity(matches_of(8, 0), 10, loads_of(5, 4), 0.5) == 0


def test_a_saturated_holder_loses_to_an_idle_rank() -> None:
    assert prefix_affinity(matches_of(10, 0), 10, loads_of(100, 0), 0.5) == 1


def test_an_even_fleet_ignores_load() -> None:
    for load in (0, 1, 1000):
        assert prefix_affinity(matches_of(0, 1, 0), 100, loads_of(load, load, load), 5.0) == 1


def test_the_load_term_is_uncapped() -> None:
    """Full hit against no hit at alpha 0.01: it takes an imbalance of 100 means, and gets it."""
    assert prefix_affinity(matches_of(10, 0), 10, loads_of(1000, *[0] * 255), 0.01) == 1
    assert prefix_affinity(matches_of(10, 0), 10, loads_of(99, *[0] * 255), 0.01) == 0


def test_a_deeper_match_wins() -> None:
    assert prefix_affinity(matches_of(3, 7, 5), 10, loads_of(0, 0, 0), 0.5) == 1


def test_a_tie_goes_to_the_least_loaded() -> None:
    assert prefix_affinity(matches_of(4, 4, 4), 10, loads_of(2, 1, 3), 0.0) == 1


def test_an_equal_tie_goes_to_the_least_recently_chosen() -> None:
    loads = loads_of(1, 1, 1)
    assert prefix_affinity(matches_of(4, 4, 4), 10, loads, 0.5) == 0
    loads.give_back(Slot(0))
    loads.charge(Slot(0))
    assert prefix_affinity(matches_of(4, 4, 4), 10, loads, 0.5) == 1


def test_ties_between_different_depths_follow_the_same_order() -> None:
    """Half a hit is worth one request at alpha 0.5 and mean 1: scores tie, the lighter wins."""
    assert prefix_affinity(matches_of(5, 0), 10, loads_of(2, 1), 0.5 * 1.5) == 1


def test_without_any_hit_the_least_loaded_gets_it_even_at_alpha_zero() -> None:
    assert prefix_affinity(matches_of(0, 0, 0), 10, loads_of(2, 1, 3), 0.0) == 1
    assert prefix_affinity(matches_of(0, 0, 0), 0, loads_of(2, 1, 3), 0.5) == 1


def test_three_ranks_with_the_same_prefix_share_six_requests_evenly() -> None:
    loads = loads_of(0, 0, 0)
    for _ in range(6):
        loads.charge(prefix_affinity(matches_of(4, 4, 4), 4, loads, 0.5))
    assert [loads.load(Slot(slot)) for slot in range(3)] == [2, 2, 2]


def test_load_balanced_ignores_prefixes() -> None:
    assert load_balanced(matches_of(10, 0, 0), 10, loads_of(1, 1, 0), 0.5) == 2


def test_load_balanced_takes_turns_on_an_idle_fleet() -> None:
    loads, chosen = loads_of(0, 0, 0), []
    for _ in range(6):
        slot = load_balanced([Match(0, 0b111)], 0, loads, 0.5)
        loads.charge(slot)
        loads.give_back(slot)
        chosen.append(slot)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    loads, chosen = loads_of(0, 0, 0), []
    for _ in range(6):
        slot = round_robin(matches_of(10, 0, 5), 10, loads, 0.5)
        loads.charge(slot)
        if slot == 0:
            loads.give_back(slot)
        chosen.append(slot)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_policies_go_by_name_and_say_whether_they_read_prefixes() -> None:
    assert {name: reads_prefixes(name) for name in POLICIES} == {
        "prefix_affinity": True,
        "longest_prefix": True,
        "first_prefix_block": True,
        "load_balanced": False,
        "round_robin": False,
    }


@pytest.mark.parametrize("policy", POLICIES.values())
def test_only_ranks_that_are_offered_are_chosen(policy: object) -> None:
    loads = loads_of(0, 5, 7)
    assert policy([Match(0, 0b100)], 4, loads, 0.5) == 2  # type: ignore[operator]


def plain_prefix_affinity(held: list[int], blocks: int, loads: RankLoads, alpha: Fraction) -> Slot:
    """The rule as it is written, exactly, over every rank."""
    mean = Fraction(loads.total, len(held))

    def rank(slot: int) -> tuple[Fraction, int, int]:
        load = loads.load(Slot(slot))
        score = Fraction(held[slot], blocks) - alpha * (load - mean) / max(Fraction(1), mean)
        return score, -load, -loads.turn(Slot(slot))

    return Slot(max(range(len(held)), key=rank))


@given(
    ranks=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=1, max_size=40),
    alpha=st.sampled_from([0, 1, 2, 4, 8]),
)
def test_the_mask_arithmetic_agrees_with_the_rule_as_written(
    ranks: list[tuple[int, int]], alpha: int
) -> None:
    """Alphas and depths are eighths, and the mean is forced to a power of two, so that floats are
    exact and ties are ties in both."""
    held, loads = [h for h, _ in ranks], loads_of(*(load for _, load in ranks))
    floor = 1 if loads.mean <= 1 else 2 ** max(0, round(loads.mean)).bit_length()
    while loads.total < floor * len(held) and loads.mean > 1:
        loads.charge(Slot(loads.total % len(held)))
    expected = plain_prefix_affinity(held, 8, loads, Fraction(alpha, 8))
    assert prefix_affinity(matches_of(*held), 8, loads, alpha / 8) == expected


def test_loads_stay_consistent_through_random_work() -> None:
    random_ = random.Random(5)
    loads = RankLoads(max_load=4)
    open_slots: dict[Slot, int] = {}
    for _ in range(3000):
        slot = Slot(random_.randrange(70))
        if slot not in open_slots:
            loads.open(slot)
            open_slots[slot] = 0
        elif random_.random() < 0.5:
            loads.charge(slot)
            open_slots[slot] += 1
        elif open_slots[slot]:
            loads.give_back(slot)
            open_slots[slot] -= 1
        else:
            loads.close(slot)
            del open_slots[slot]
        loads.check()
        among = random_.getrandbits(70) & sum(1 << s for s in open_slots)
        if among:
            chosen = loads.least_loaded(among)
            best = min((open_slots[s], loads.turn(s)) for s in slots_of(among))
            assert (open_slots[chosen], loads.turn(chosen)) == best
    assert {slot: loads.load(slot) for slot in open_slots} == open_slots
    for slot, load in open_slots.items():
        for _ in range(load):
            loads.give_back(slot)
    assert loads.total == 0


def test_a_rank_at_its_limit_is_not_available_until_one_request_ends() -> None:
    loads = RankLoads(max_load=2)
    loads.open(Slot(0))
    loads.charge(Slot(0))
    assert loads.available == 0b1
    loads.charge(Slot(0))
    assert loads.available == 0
    loads.give_back(Slot(0))
    assert loads.available == 0b1
