"""`homing bench route`: replays request traces through the coordinator's routing.

The coordinator's own index, loads and policies choose; simulated ranks keep time. The table goes
to stderr, one JSON object to stdout. With `--costs` nothing is replayed: it measures what a
decision takes and what an entry of the index holds.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from homing.bench.replay.costs import decision_cost, index_cost
from homing.bench.replay.generated import GENERATED
from homing.bench.replay.ranks import StepCost
from homing.bench.replay.simulation import Replay, ReplayConfig, ReplayResult, parse_policy
from homing.bench.replay.traces import (
    BUNDLED,
    is_recording,
    lines_of,
    load_bundled,
    load_trace,
)
from homing.bench.replay.workload import Workload
from homing.coordinator import recording
from homing.coordinator.router import RoutingConfig
from homing.errors import ConfigError

SECONDS_OF_BURST = 3.0
"""Arrival times of the Mooncake traces are rounded to these; copies are spread over them."""


class Scale(NamedTuple):
    """What fleet a trace is traffic for. Larger ones replay disjoint copies of it, side by side."""

    ranks: int
    speedup: float
    """How much faster than recorded it is sent to so many ranks: near what they can bear."""


SCALE_OF_TRACE = {
    "conversation": Scale(16, 4.0),
    "synthetic": Scale(16, 4.0),
    "chat-sessions": Scale(4, 1.0),
    "rl-groups": Scale(4, 1.0),
}
"""A file is replayed as it is, whatever the fleet."""


@dataclass(frozen=True)
class RouteBenchConfig:
    """Replay request traces through the coordinator's routing; print one JSON object."""

    trace: tuple[str, ...] = ("conversation",)
    """Files, or names: conversation, synthetic, chat-sessions, rl-groups (recorded);
    shared-prefix, multi-turn, rollout, documents (generated)."""
    policies: str = "round_robin,load_balanced,prefix_affinity,prefix_affinity/tokens,work"
    """Routing policies, comma-separated; /tokens counts load in outstanding tokens."""
    ranks: str = "16"
    """Fleet sizes, comma-separated."""
    load: float = 1.0
    """Speed of arrivals relative to the trace's own default. Open-loop traces only."""
    limit: int | None = None
    """Replay only so many sessions of a trace; a request of an open-loop trace is a session."""
    alpha: float = 0.5
    """Of prefix_affinity."""
    prefix_ttl_s: float = 300.0
    """Seconds of the trace until an unrepeated prefix is forgotten."""
    slow_ranks: int = 0
    """So many ranks take three times as long for everything."""
    seed: int = 7
    """Of the generated traces."""
    costs: bool = False
    """Measure instead the decisions for prompts of --prompt-tokens, and the index's memory."""
    prompt_tokens: int = 131_072
    """Of the prompts that --costs routes."""
    index_entries: int = 1_000_000
    """Of the index that --costs fills."""

    def __post_init__(self) -> None:
        if self.load <= 0:
            raise ConfigError(f"--load is {self.load}; it must be more than 0")
        if min(self.fleet_sizes, default=0) < 1:
            raise ConfigError("--ranks start at 1")
        for policy in self.policies.split(","):
            parse_policy(policy)

    @property
    def fleet_sizes(self) -> list[int]:
        try:
            return [int(number) for number in self.ranks.split(",")]
        except ValueError:
            raise ConfigError(f"--ranks is {self.ranks!r}; it is numbers with commas") from None


def main(argv: Sequence[str] | None = None) -> int:
    config = tyro.cli(RouteBenchConfig, prog="homing bench route", args=argv)
    json.dump(run(config), sys.stdout, indent=2)
    print()
    return 0


def run(config: RouteBenchConfig) -> dict[str, Any]:
    """All combinations, one after another. Raises ConfigError for a trace that is none."""
    report: dict[str, Any] = {"bench": "route", **asdict(config)}
    if config.costs:
        return report | {"results": measure_costs(config)}
    recordings = [compared for trace in config.trace if (compared := compare_recording(trace))]
    return report | {"recordings": recordings, "results": replay_all(config)}


def compare_recording(trace: str) -> dict[str, Any] | None:
    """Of a coordinator's own recording: does its router decide the same again?"""
    if trace in BUNDLED or trace in GENERATED or not is_recording(Path(trace)):
        return None
    comparison = recording.replay(lines_of(Path(trace)))
    return {"trace": trace, **comparison._asdict()}


def replay_all(config: RouteBenchConfig) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for trace in config.trace:
        for num_ranks in config.fleet_sizes:
            workload = load_workload(config, trace, num_ranks)
            _print_header(workload, num_ranks)
            for policy in config.policies.split(","):
                result = replay(config, workload, policy, num_ranks)
                _print_row(result)
                results.append({"trace": trace} | asdict(result))
    return results


def measure_costs(config: RouteBenchConfig) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for num_ranks in config.fleet_sizes:
        for policy in config.policies.split(","):
            routing = routing_config(config, policy, num_ranks)
            decision = decision_cost(policy, routing, num_ranks, config.prompt_tokens)
            results.append(asdict(decision))
            print(f"{decision}", file=sys.stderr, flush=True)
        for points_per_prompt in (1, 100):
            index = index_cost(config.index_entries, num_ranks, 4, points_per_prompt)
            results.append(asdict(index))
            print(f"{index}", file=sys.stderr, flush=True)
    return results


def load_workload(config: RouteBenchConfig, trace: str, num_ranks: int) -> Workload:
    """A trace at the speed and in the number of copies that suit the fleet."""
    if trace in GENERATED:
        workload = GENERATED[trace](num_ranks, config.seed)
        return workload.first(config.limit).compressed(config.load)
    recorded = load_bundled(trace) if trace in BUNDLED else load_trace(Path(trace), trace)
    workload = recorded.first(config.limit)
    if trace not in SCALE_OF_TRACE:
        return workload.compressed(config.load)
    scale = SCALE_OF_TRACE[trace]
    copies = max(1, num_ranks // scale.ranks)
    speedup = scale.speedup * config.load * num_ranks / (scale.ranks * copies)
    return workload.compressed(speedup).copied(copies, SECONDS_OF_BURST / speedup / copies)


def replay(
    config: RouteBenchConfig, workload: Workload, policy: str, num_ranks: int
) -> ReplayResult:
    gc.collect()
    gc.disable()  # a collection's pause would be counted as some decision's
    try:
        routing = routing_config(config, policy, num_ranks)
        replay_config = ReplayConfig(routing, num_ranks, config.slow_ranks)
        return Replay(workload, replay_config, StepCost()).run()
    finally:
        gc.enable()


def routing_config(config: RouteBenchConfig, policy: str, num_ranks: int) -> RoutingConfig:
    name, unit = parse_policy(policy)
    return RoutingConfig(
        policy=name,
        load_unit=unit,
        alpha=config.alpha,
        prefix_ttl_s=config.prefix_ttl_s,
        max_index_entries=sys.maxsize,  # as many as the TTL lets live, which the table shows
        max_requests=sys.maxsize,  # none is refused, so that all policies do equal work
    )


def _print_header(workload: Workload, num_ranks: int) -> None:
    print(
        f"\n{workload.name}: {workload.num_requests:,} requests, {num_ranks} ranks\n"
        f"{'policy':24}{'hit %':>7}{'TTFT mean':>11}{'p50':>9}{'p99':>9}{'latency':>9}"
        f"{'makespan':>10}{'busy %':>8}{'imbal.':>8}{'dec. us':>9}{'entries':>10}",
        file=sys.stderr,
    )


def _print_row(r: ReplayResult) -> None:
    print(
        f"{r.policy:24}{100 * r.hit_rate:7.1f}{r.ttft_mean_s:11.3f}{r.ttft_p50_s:9.3f}"
        f"{r.ttft_p99_s:9.2f}{r.latency_mean_s:9.2f}{r.makespan_s:10.1f}{100 * r.busy:8.1f}"
        f"{r.imbalance:8.2f}{r.decision_us:9.1f}{r.index_entries:10,}",
        file=sys.stderr,
        flush=True,
    )
