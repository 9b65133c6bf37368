"""`homing bench coordinator`: what the coordinator itself costs, per request and per Output.

The real coordinator process, routing by prefix with hashes on and a filled index; engines and
clients are processes that compute nothing. CPU time is that of the whole coordinator process, its
I/O thread included, divided by what it handled meanwhile.

A request costs `submission + outputs * output`. Each size runs twice, with `outputs` Outputs a
request and with one, and the two give both unknowns; settling the finished request is part of the
submission. Long prompts are lent, as clients of the coordinator's machine do; what they cost when
they are sent, as others must, is measured, too. The bare loop sends each Submit back where it came
from, prompt and all: what no router in Python can undercut, measured in the same minute on the same
machine. The runs take turns, and of what each round gives the median counts: a machine's pace
wanders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import tyro

from homing.bench.engine_peer import BLOCK_SIZE
from homing.bench.processes import Processes, cpu_seconds, processes
from homing.prefix import TOKEN_BYTES, num_routing_points
from homing.transport import MIN_LOAN_BYTES

PREFILL_PROMPT_TOKENS = 16384


@dataclass(frozen=True)
class CoordinatorBenchConfig:
    """Measure the coordinator alone; print one JSON object."""

    ranks: int = 4
    """Engines, each a process that answers at once."""
    clients: int = 2
    """Clients, each a process."""
    prompt_tokens: str = "128,2048,16384,131072"
    """Prompt sizes, separated by commas; one result each."""
    outputs: int = 8
    """Outputs that answer a request."""
    outstanding: int = 64
    """Requests that each client keeps unanswered."""
    hit_share: float = 0.5
    """Share of requests whose whole prefix is in the index; the prefix of the others is new."""
    index_entries: int = 100_000
    """Entries in the index before anything is measured."""
    rounds: int = 3
    """Of each size. The medians count."""
    seconds: float = 2.0
    """Duration of each run."""
    policy: str = "prefix_affinity"
    """Routing policy of the coordinator."""

    @property
    def sizes(self) -> list[int]:
        return [int(size) for size in self.prompt_tokens.split(",")]


@dataclass(frozen=True)
class Load:
    """What a run of all clients brought."""

    requests: int
    seconds: float
    cpu_us_per_request: float


class Bench:
    def __init__(self, config: CoordinatorBenchConfig, family: Processes) -> None:
        self._config = config
        self.family = family

    def run_clients(
        self,
        server: subprocess.Popen[str],
        address: str,
        prompt_tokens: int,
        *,
        outputs: int,
        lends: bool,
        hit_share: float | None = None,
        max_requests: int | None = None,
    ) -> Load:
        """Let all clients work at once; `server` is whose CPU time counts."""
        config = self._config
        words = {
            "--address": address,
            "--ranks": config.ranks,
            "--prompt-tokens": prompt_tokens,
            "--outputs": outputs,
            "--outstanding": config.outstanding,
            "--hit-share": config.hit_share if hit_share is None else hit_share,
            "--seconds": config.seconds if max_requests is None else 600,
            "--max-requests": max_requests,
            "--lends": lends,
        }
        arguments = [str(word) for pair in words.items() for word in pair]
        before = cpu_seconds(server)
        clients = [
            self.family.start("homing.bench.coordinator_peers", "client", *arguments)
            for _ in range(config.clients)
        ]
        reports = [json.loads(client.communicate()[0]) for client in clients]
        cpu_s = cpu_seconds(server) - before
        requests = sum(report["requests"] for report in reports)
        started = min(report["started"] for report in reports)
        seconds = max(report["ended"] for report in reports) - started
        return Load(requests, seconds, 1e6 * cpu_s / requests)


def run(config: CoordinatorBenchConfig) -> dict[str, Any]:
    """Measure; returns what is printed."""
    with processes() as family:
        bench = Bench(config, family)
        address, bare_address = family.address("coordinator"), family.address("bare")
        flags = ("--bind", address, "--policy", config.policy)
        coordinator = family.start("homing.coordinator", *flags, quiet=True)
        bare = family.start("homing.bench.coordinator_peers", "bare", "--address", bare_address)
        for rank in range(config.ranks):
            words = ("engine", "--address", address, "--rank", str(rank))
            family.start("homing.bench.coordinator_peers", *words)
        _fill_index(bench, coordinator, address, config)
        results = [
            _measure(bench, coordinator, address, bare, bare_address, size, config)
            for size in config.sizes
        ]
    return {
        "bench": "coordinator",
        "policy": config.policy,
        "ranks": config.ranks,
        "clients": config.clients,
        "outstanding_per_client": config.outstanding,
        "outputs_per_request": config.outputs,
        "hit_share": config.hit_share,
        "rounds": config.rounds,
        "index_entries_at_start": config.index_entries,
        "cpus": len(os.sched_getaffinity(0)),
        "submission_cpu": f"solved from runs with {config.outputs} Outputs a request and with 1",
        "results": results,
    }


def _fill_index(
    bench: Bench,
    coordinator: subprocess.Popen[str],
    address: str,
    config: CoordinatorBenchConfig,
) -> None:
    """By real submissions of prompts that are all new."""
    entries_of_prompt = num_routing_points(PREFILL_PROMPT_TOKENS // BLOCK_SIZE)
    prompts = -(-config.index_entries // entries_of_prompt)
    bench.run_clients(
        coordinator,
        address,
        PREFILL_PROMPT_TOKENS,
        outputs=1,
        lends=True,
        hit_share=0.0,
        max_requests=-(-prompts // config.clients),
    )


def _measure(
    bench: Bench,
    coordinator: subprocess.Popen[str],
    address: str,
    bare: subprocess.Popen[str],
    bare_address: str,
    prompt_tokens: int,
    config: CoordinatorBenchConfig,
) -> dict[str, Any]:
    measured: defaultdict[str, list[float]] = defaultdict(list)  # what -> of each round
    num_requests = 0

    def cpu_us(server: subprocess.Popen[str], at: str, outputs: int, lends: bool) -> float:
        load = bench.run_clients(server, at, prompt_tokens, outputs=outputs, lends=lends)
        if outputs > 1:
            measured["requests_per_s"].append(load.requests / load.seconds)
        nonlocal num_requests
        num_requests += load.requests
        return load.cpu_us_per_request

    for _ in range(config.rounds):
        many = cpu_us(coordinator, address, config.outputs, lends=True)
        one = cpu_us(coordinator, address, 1, lends=True)
        output = (many - one) / (config.outputs - 1)
        measured["cpu_us_per_request"].append(many)
        measured["cpu_us_per_output"].append(output)
        measured["submission_cpu_us"].append(one - output)
        if prompt_tokens * TOKEN_BYTES >= MIN_LOAN_BYTES:
            sent = cpu_us(coordinator, address, 1, lends=False)
            measured["sent_submission_cpu_us"].append(sent - output)
        bare_us = cpu_us(bare, bare_address, 1, lends=False)
        measured["bare_router_cpu_us"].append(bare_us)
    medians = {what: round(median(values), 1) for what, values in measured.items()}
    return {"prompt_tokens": prompt_tokens, **medians, "num_requests": num_requests}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and print its JSON."""
    config = tyro.cli(CoordinatorBenchConfig, prog="homing bench coordinator", args=argv)
    json.dump(run(config), sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
