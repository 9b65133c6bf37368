"""`homing bench route`: what it must show on a slice of the trace, and what it prints."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from homing.bench.replay.costs import decision_cost, index_cost
from homing.bench.replay.ranks import StepCost
from homing.bench.replay.simulation import Replay, ReplayConfig, ReplayResult
from homing.bench.route import (
    RouteBenchConfig,
    load_workload,
    main,
    parse_policy,
    replay,
    routing_config,
)
from homing.coordinator.loads import Slot
from homing.errors import ConfigError

SLICE = RouteBenchConfig(limit=2000)
"""The first ten minutes of the conversation trace."""


@pytest.fixture(scope="module")
def conversation() -> dict[str, ReplayResult]:
    workload = load_workload(SLICE, "conversation", 16)
    policies = ("round_robin", "prefix_affinity", "prefix_affinity/tokens", "work")
    return {policy: replay(SLICE, workload, policy, 16) for policy in policies}


def test_prefix_affinity_halves_the_ttft_of_round_robin(
    conversation: dict[str, ReplayResult],
) -> None:
    mean_s = {policy: result.ttft_mean_s for policy, result in conversation.items()}
    assert mean_s["prefix_affinity"] <= 0.5 * mean_s["round_robin"]


@pytest.mark.parametrize("policy", ["work", "prefix_affinity/tokens"])
def test_work_and_load_in_tokens_are_15_percent_better_than_prefix_affinity(
    conversation: dict[str, ReplayResult], policy: str
) -> None:
    best = conversation["prefix_affinity"].ttft_mean_s
    assert conversation[policy].ttft_mean_s <= 0.85 * best


def test_hits_are_predicted_nearly_as_they_come(conversation: dict[str, ReplayResult]) -> None:
    for policy in ("prefix_affinity", "work"):
        result = conversation[policy]
        assert result.predicted_hit_rate == pytest.approx(result.hit_rate, abs=0.03)


def test_a_replay_repeats_exactly() -> None:
    config = RouteBenchConfig(limit=120)
    for trace in ("conversation", "rl-groups", "documents"):
        first, second = (
            asdict(replay(config, load_workload(config, trace, 4), "work", 4)) for _ in range(2)
        )
        assert first.pop("decision_us") > 0
        second.pop("decision_us")
        assert first == second


def test_one_json_object_on_stdout_and_the_table_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--limit", "30", "--policies", "round_robin,work", "--ranks", "2,4"]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)["results"]
    assert [(r["policy"], r["ranks"]) for r in results] == [
        ("round_robin", 2),
        ("work", 2),
        ("round_robin", 4),
        ("work", 4),
    ]
    fields = "hit_rate ttft_mean_s ttft_p50_s ttft_p99_s makespan_s imbalance decision_us"
    for result in results:
        assert result["requests"] == 30
        assert set(fields.split()) | {"index_entries"} <= result.keys()
    assert printed.err.count("conversation: 30 requests") == 2
    assert printed.err.count("work") == 2


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--policies", "best"], "policy is 'best'; there are prefix_affinity"),
        (["--ranks", "0"], "--ranks start at 1"),
        (["--ranks", "4,x"], "--ranks is '4,x'"),
        (["--load", "0"], "--load is 0"),
        (["--trace", "/nowhere/trace.jsonl"], "trace /nowhere/trace.jsonl: No such file"),
    ],
)
def test_a_bad_flag_is_an_error_in_one_line(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        main(flags)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_policy_names_the_unit_of_its_load() -> None:
    assert parse_policy("prefix_affinity/tokens") == ("prefix_affinity", "tokens")
    assert parse_policy("work") == ("work", "requests")


def test_larger_fleets_replay_disjoint_copies_at_the_same_rate_for_each_rank() -> None:
    one = load_workload(RouteBenchConfig(limit=50), "conversation", 16)
    four = load_workload(RouteBenchConfig(limit=50), "conversation", 64)
    quarter = load_workload(RouteBenchConfig(limit=50), "conversation", 4)
    assert four.num_requests == 4 * one.num_requests
    last = one.sessions[-1].start_s
    assert quarter.sessions[-1].start_s == pytest.approx(4 * last)
    assert four.sessions[-1].start_s == pytest.approx(last, abs=1.0)
    blocks = {block for s in four.sessions for turn in s.turns for block in turn.block_ids}
    assert len(blocks) == 4 * len(
        {block for s in one.sessions for turn in s.turns for block in turn.block_ids}
    )


def test_work_learns_which_rank_is_slow_and_spares_it() -> None:
    """Rank 0 of four takes three times as long; nobody says so but its reports."""
    config = RouteBenchConfig()
    workload = load_workload(config, "multi-turn", 4)
    routing = routing_config(config, "work", 4)
    slow = Replay(workload, ReplayConfig(routing, 4, num_slow_ranks=1), StepCost())
    slow.run()
    assert slow.router.backlog is not None
    factors = [slow.router.backlog.model.factor(Slot(slot)) for slot in range(4)]
    assert factors[0] / factors[1] == pytest.approx(3.0, rel=0.3)
    assert factors[1:] == pytest.approx([factors[1]] * 3, rel=0.3)


# What routing costs


@pytest.mark.parametrize("policy", ["prefix_affinity", "longest_prefix", "first_prefix_block"])
def test_the_cost_of_a_decision_for_131072_tokens_and_256_ranks_is_measured(policy: str) -> None:
    routing = routing_config(RouteBenchConfig(), policy, 256)
    cost = decision_cost(policy, routing, 256, 131_072)
    assert cost.routing_points < 180
    assert min(cost.known_us, cost.fresh_us) > 0  # the figures are in docs/routing.md


@pytest.mark.parametrize("points_per_prompt", [1, 8, 100])
def test_an_index_entry_takes_less_than_300_bytes_and_refreshing_takes_no_more(
    points_per_prompt: int,
) -> None:
    few = index_cost(30_000, 256, 2, points_per_prompt)
    many = index_cost(30_000, 256, 8, points_per_prompt)
    assert few.bytes_per_entry < 300
    assert many.refreshed_entries == few.refreshed_entries == 30_000
    assert many.refreshed_bytes_per_entry < 300
    assert many.refreshed_bytes_per_entry == pytest.approx(few.refreshed_bytes_per_entry, rel=0.05)
