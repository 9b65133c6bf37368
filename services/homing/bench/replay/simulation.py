"""Replays a workload through the coordinator's own router against simulated ranks.

A discrete-event simulation on one clock: sessions start, ranks end steps, engines report. All of
it is deterministic but for `decision_us`, which is measured.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from homing.bench.replay.ranks import Job, SimulatedRank, StepCost
from homing.bench.replay.workload import Workload, routing_digests
from homing.coordinator.loads import Slot
from homing.coordinator.router import LoadUnit, RankRouter, RoutingConfig
from homing.coordinator.routing import POLICY_NAMES
from homing.errors import ConfigError

TOKENS_SUFFIX = "/tokens"

SLOWNESS = 3.0

BLOCK_TOKENS = 16
"""The router's blocks: the engines' default."""


@dataclass(frozen=True)
class ReplayConfig:
    routing: RoutingConfig
    num_ranks: int
    num_slow_ranks: int = 0
    """So many of the ranks take `SLOWNESS` times as long for a step."""
    report_s: float = 0.5
    """How often engines report."""


@dataclass(frozen=True)
class ReplayResult:
    """One line of the table. Times in seconds of the replay."""

    policy: str
    ranks: int
    requests: int
    hit_rate: float
    """Of all prompt tokens, those that ranks found cached."""
    predicted_hit_rate: float
    """Of all prompt tokens, those that the index said the chosen rank held."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_mean_s: float
    makespan_s: float
    busy: float
    """Share of the makespan that ranks were in a step, mean over ranks."""
    imbalance: float
    """The busiest rank's seconds in steps over the mean rank's."""
    decision_us: float
    """Median time of a decision: look-up, choice and entry into the index. Measured."""
    index_entries: int
    """The most there were."""


def parse_policy(label: str) -> tuple[str, LoadUnit]:
    """`prefix_affinity/tokens` -> the policy and the unit of its load."""
    name = label.removesuffix(TOKENS_SUFFIX)
    if name not in POLICY_NAMES:
        raise ConfigError(f"policy is {name!r}; there are {', '.join(POLICY_NAMES)}")
    return name, "tokens" if label.endswith(TOKENS_SUFFIX) else "requests"


def policy_label(config: RoutingConfig) -> str:
    return config.policy + (TOKENS_SUFFIX if config.load_unit == "tokens" else "")


class Replay:
    def __init__(self, workload: Workload, config: ReplayConfig, cost: StepCost) -> None:
        self._workload = workload
        self._config = config
        self.router = RankRouter(
            # The trace's time is compressed, and so is what depends on it.
            replace(config.routing, prefix_ttl_s=config.routing.prefix_ttl_s / workload.time_scale),
            now=0.0,
        )
        self._rank_of_slot: dict[Slot, SimulatedRank] = {}
        for number in range(config.num_ranks):
            slot = self.router.open_slot()
            self.router.open(slot)
            slowness = SLOWNESS if number < config.num_slow_ranks else 1.0
            self._rank_of_slot[slot] = SimulatedRank(
                workload.kv_tokens, workload.block_tokens, cost, slowness=slowness
            )
        self._events: list[tuple[float, int, Slot | tuple[int, int] | None]] = []
        self._order = count()
        self._jobs: list[Job] = []
        self._decisions_s: list[float] = []
        self._max_entries = 0
        self._unfinished = workload.num_requests

    def run(self) -> ReplayResult:
        for number, session in enumerate(self._workload.sessions):
            self._at(session.start_s, (number, 0))
        if self.router.backlog:
            self._at(self._config.report_s, None)
        while self._unfinished:
            now, _, event = heappop(self._events)
            if event is None:
                self._report(now)
            elif isinstance(event, tuple):
                self._send(*event, now)
            else:
                self._end_step(event, now)
        return self._result()

    def _at(self, when: float, event: Slot | tuple[int, int] | None) -> None:
        heappush(self._events, (when, next(self._order), event))

    def _send(self, session: int, number: int, now: float) -> None:
        workload, router = self._workload, self.router
        turn = workload.sessions[session].turns[number]
        own_id = session << 16 | number
        digests = None
        if router.reads_prefixes:
            digests = routing_digests(turn, workload.block_tokens, BLOCK_TOKENS, own_id)
        started = time.perf_counter()
        router.advance(now)
        decision = router.route(digests, turn.num_prompt_tokens, BLOCK_TOKENS, now)
        self._decisions_s.append(time.perf_counter() - started)
        self._max_entries = max(self._max_entries, router.index.num_entries)
        job = Job(turn, (session, number), decision, arrived=now)
        rank = self._rank_of_slot[decision.slot]
        self._at(rank.submit(job, now), decision.slot)

    def _end_step(self, slot: Slot, now: float) -> None:
        rank = self._rank_of_slot[slot]
        if rank.step is None or rank.step.ends != now:
            return  # that run of steps was cut
        for job in rank.end_step():
            self.router.end(job.decision, job.turn.num_output_tokens)
            self._jobs.append(job)
            self._unfinished -= 1
            session, number = job.place
            if number + 1 < len(self._workload.sessions[session].turns):
                self._at(now + job.turn.think_s, (session, number + 1))
        if rank.step is not None:
            self._at(rank.step.ends, slot)

    def _report(self, now: float) -> None:
        for slot, rank in self._rank_of_slot.items():
            self.router.reported(slot, rank.report(), now)
        self._at(now + self._config.report_s, None)

    def _result(self) -> ReplayResult:
        jobs, ranks = self._jobs, self._rank_of_slot.values()
        ttft = sorted(job.first_token - job.arrived for job in jobs)
        makespan = max(job.finished for job in jobs) - min(job.arrived for job in jobs)
        busy = [rank.busy_s for rank in ranks]
        prompt_tokens = sum(job.turn.num_prompt_tokens for job in jobs)
        return ReplayResult(
            policy=policy_label(self._config.routing),
            ranks=self._config.num_ranks,
            requests=len(jobs),
            hit_rate=sum(job.num_cached for job in jobs) / prompt_tokens,
            predicted_hit_rate=sum(job.decision.num_cached_tokens for job in jobs) / prompt_tokens,
            ttft_mean_s=statistics.fmean(ttft),
            ttft_p50_s=ttft[len(ttft) // 2],
            ttft_p99_s=ttft[len(ttft) * 99 // 100],
            latency_mean_s=statistics.fmean(job.finished - job.arrived for job in jobs),
            makespan_s=makespan,
            busy=statistics.fmean(busy) / makespan,
            imbalance=max(busy) / statistics.fmean(busy),
            decision_us=1e6 * statistics.median(self._decisions_s),
            index_entries=self._max_entries,
        )
