"""Explanations: what people are told of the last decisions."""

from __future__ import annotations

import pytest

from homing.coordinator.explain import MAX_SCORES, SHOWN, policy_scores
from homing.coordinator.loads import RankLoads, Slot
from homing.coordinator.router import RankRouter, RoutingConfig
from homing.coordinator.routing import POLICY_NAMES, Match

BLOCK = 16
PROMPT = b"".join(name.encode().ljust(16, b".") for name in "abcd")


def new_router(policy: str = "prefix_affinity", num_ranks: int = 2) -> RankRouter:
    config = RoutingConfig(
        policy=policy,
        alpha=0.5,
        load_unit="requests",
        prefix_ttl_s=100.0,
        max_index_entries=1000,
        max_requests=10_000,
    )
    router = RankRouter(config, now=0.0, explain=True)
    for _ in range(num_ranks):
        router.open(router.open_slot())
    return router


def told(router: RankRouter, now: float = 0.0, num_ranks: int = 2):
    return router.explanations.snapshot({Slot(n): n for n in range(num_ranks)}, now)


def test_a_decision_is_told_with_the_score_of_each_rank() -> None:
    router = new_router()
    router.route(PROMPT, 4 * BLOCK, BLOCK, 1.0)
    router.route(PROMPT[: 2 * 16], 2 * BLOCK, BLOCK, 2.0)
    newest, oldest = told(router, now=5.0)
    assert (oldest["age_s"], oldest["num_blocks"], oldest["rank"]) == (4.0, 4, 0)
    assert [score["matched_blocks"] for score in oldest["scores"]] == [0, 0]
    assert (newest["age_s"], newest["num_blocks"], newest["rank"]) == (3.0, 2, 0)
    # One request in flight on rank 0: the mean is a half, the floor under it 1.
    assert newest["scores"] == [
        {"rank": 0, "matched_blocks": 2, "load": 1, "score": 1.0 - 0.5 * 0.5},
        {"rank": 1, "matched_blocks": 0, "load": 0, "score": 0.5 * 0.5},
    ]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_by_every_policy_the_chosen_rank_has_the_best_score(policy: str) -> None:
    router = new_router(policy, num_ranks=4)
    for number in range(12):
        router.route(
            PROMPT[: 16 * (1 + number % 4)], (1 + number % 4) * BLOCK, BLOCK, float(number)
        )
    assert len(told(router, num_ranks=4)) == 12
    for decision in told(router, num_ranks=4):
        best = max(score["score"] for score in decision["scores"])
        chosen = next(s for s in decision["scores"] if s["rank"] == decision["rank"])
        assert chosen["score"] == pytest.approx(best)


def test_of_a_busy_fleets_decisions_a_few_a_second_are_told() -> None:
    router = new_router()
    decided = [router.route(PROMPT, 4 * BLOCK, BLOCK, number / 1000) for number in range(3000)]
    assert len(decided) == 3000
    ages = [decision["age_s"] for decision in told(router, now=3.0)]
    assert len(ages) == SHOWN
    assert ages == sorted(ages)
    assert max(ages) < 2.1


def test_of_many_ranks_the_best_are_told_and_the_chosen_one_always() -> None:
    router = new_router("round_robin", num_ranks=100)
    router.route(None, 4 * BLOCK, BLOCK, 0.0)
    (decision,) = told(router, num_ranks=100)
    assert len(decision["scores"]) == MAX_SCORES
    assert decision["rank"] in [score["rank"] for score in decision["scores"]]


def test_ranks_that_are_gone_are_left_out() -> None:
    router = new_router()
    router.route(PROMPT, 4 * BLOCK, BLOCK, 0.0)
    router.route(None, 4 * BLOCK, BLOCK, 0.1)
    (decision,) = told(router, num_ranks=1)
    assert [score["rank"] for score in decision["scores"]] == [0]


def test_the_scores_of_prefix_affinity_are_those_it_decides_by() -> None:
    loads = RankLoads(max_load=10)
    for slot in (Slot(0), Slot(1)):
        loads.open(slot)
    for _ in range(3):
        loads.charge(Slot(1))
    matches = [Match(3, 0b10), Match(0, 0b01)]
    full, empty = policy_scores("prefix_affinity", matches, 4, loads, 0.5)
    assert (empty.slot, empty.score) == (0, 0.5 * 1.5 / 1.5)
    assert (full.slot, full.score) == (1, 0.75 - 0.5 * 1.5 / 1.5)
