"""Everything is killed, stopped and cut off at random while it works: nothing is lost or repeated.

Product engines of a tiny model with caches of 64 blocks, one coordinator, two client processes. The
short form runs with the other tests. The full form, 2,000 requests over a minute:

    python -m tests.process.test_chaos [SEED]
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from homing.client import Client
from tests.support.chaos_client import ended
from tests.support.process_fleet import Process, ProcessFleet, greedy_answers
from tests.support.tiny_models import make_tiny_model

NUM_PROMPTS = 60
NUM_CLIENTS = 2
NUM_TOKENS = 140
BURST = 20
"""Requests sent at a time: more than the caches hold, so that some wait and most take a while."""
SURE_STRIKES = ("engine killed", "network cut", "coordinator killed")
"""Of those in work the first, for these never leave requests where they are."""
HEARTBEAT_TIMEOUT_S = "2"
SEED = 20

pytestmark = pytest.mark.timeout(300)


def make_prompts(source: random.Random) -> list[list[int]]:
    """Of one to six blocks; most share their beginning with others."""
    common = [[source.randrange(10, 300) for _ in range(64)] for _ in range(6)]
    prompts: list[list[int]] = []
    for _ in range(NUM_PROMPTS):
        head = source.choice(common)[: source.choice([0, 16, 48, 64])]
        prompts.append(head + [source.randrange(10, 300) for _ in range(source.randrange(4, 32))])
    return prompts


class Chaos:
    """What happens to the fleet, by a seed."""

    def __init__(self, fleet: ProcessFleet, source: random.Random) -> None:
        self._fleet = fleet
        self._source = source
        self.done: Counter[str] = Counter()
        self.num_in_work = 0
        """Strikes while requests were in flight, by the coordinator's word."""
        self._waits_for_work = True
        self._busiest = 0
        engine, client = self._engine, self._client
        self._kinds: list[tuple[str, int, Callable[[], None]]] = [
            ("engine killed", 4, lambda: engine().signal(signal.SIGKILL)),
            ("engine told to leave", 2, lambda: engine().signal(signal.SIGTERM)),
            ("engine stopped", 3, lambda: engine().stop_for(source.uniform(0.5, 3.5))),
            ("network cut", 3, lambda: self._network().cut()),
            ("network frozen", 1, lambda: self._network().freeze()),
            ("coordinator killed", 2, lambda: fleet.coordinator.signal(signal.SIGKILL)),
            ("coordinator stopped", 2, lambda: fleet.coordinator.stop_for(source.uniform(0.2, 2))),
            ("client killed", 1, lambda: client().signal(signal.SIGKILL)),
            ("client stopped", 1, lambda: client().stop_for(source.uniform(0.5, 3.0))),
        ]

    @property
    def owes_strikes(self) -> bool:
        """On a machine that is slow with all this, the sure ones come late."""
        return self.num_in_work < len(SURE_STRIKES)

    def strike(self) -> bool:
        """Where it hurts: mostly while requests are in flight. False: none are, ask again soon."""
        loads = {rank["rank"]: rank["load"] for rank in stats_of(self._fleet).get("ranks", ())}
        self._busiest = max(loads, key=loads.__getitem__, default=0)
        in_work = loads.get(self._busiest, 0) > 0
        if not in_work and self._waits_for_work:
            return False
        sure = SURE_STRIKES[self.num_in_work : self.num_in_work + 1] if in_work else ()
        kinds = [kind for kind in self._kinds if not sure or kind[0] in sure]
        [(name, _, act)] = self._source.choices(kinds, [weight for _, weight, _ in kinds])
        self.done[name] += 1
        self.num_in_work += in_work
        self._waits_for_work = self._source.random() < 0.8
        act()
        return True

    def _rank(self) -> int:
        """Mostly the one with the most in flight."""
        if self.owes_strikes or self._source.random() < 0.7:
            return self._busiest
        return self._source.randrange(len(self._fleet.engines))

    def _engine(self) -> Process:
        return self._fleet.engines[self._rank()]

    def _client(self) -> Process:
        return self._source.choice(self._fleet.clients)

    def _network(self) -> Any:
        return self._fleet.networks[self._rank()]


def plan_clients(
    directory: Path, address: str, prompts: list[list[int]], num_requests: int, duration_s: float
) -> list[tuple[Path, Path]]:
    """The plan and the results file of each client."""
    source = random.Random(1)
    files: list[tuple[Path, Path]] = []
    for client in range(NUM_CLIENTS):
        numbers = range(client, num_requests, NUM_CLIENTS)
        requests = [
            (n, source.randrange(NUM_PROMPTS), duration_s * (n - n % BURST) / num_requests)
            for n in numbers
        ]
        plan = {"address": address, "prompts": prompts, "requests": requests}
        plan |= {"num_tokens": NUM_TOKENS, "start": time.time()}
        path = directory / f"plan-{client}.json"
        path.write_text(json.dumps(plan))
        files.append((path, directory / f"results-{client}.jsonl"))
    return files


def run_chaos(
    directory: Path, *, num_engines: int, num_requests: int, duration_s: float, seed: int
) -> dict[str, Any]:
    source = random.Random(seed)
    model = make_tiny_model("llama", directory / "model")
    prompts = make_prompts(source)
    expected = greedy_answers(model, prompts, NUM_TOKENS)
    flags = ("--heartbeat-timeout-s", HEARTBEAT_TIMEOUT_S)
    with ProcessFleet(directory, model, num_engines, *flags) as fleet:
        fleet.until(lambda: stats_of(fleet).get("live_ranks") == num_engines)
        files = plan_clients(directory, fleet.address, prompts, num_requests, duration_s)
        for number, (plan, results) in enumerate(files):
            argv = [sys.executable, "-m", "tests.support.chaos_client", str(plan), str(results)]
            fleet.clients.append(Process(f"client-{number}", argv))
        chaos = Chaos(fleet, source)
        strike_until_done(fleet, chaos, source, duration_s)
        check_results(files, num_requests, expected)
        stats = settled_stats(fleet)
        pids = [process.popen.pid for process in fleet.processes if process.popen]
        report = report_of(files, chaos, fleet, stats)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    return report


def strike_until_done(
    fleet: ProcessFleet, chaos: Chaos, source: random.Random, duration_s: float
) -> None:
    next_strike = time.monotonic() + 1.0
    last_strike = time.monotonic() + duration_s

    def all_ended() -> bool:
        nonlocal next_strike
        now = time.monotonic()
        if next_strike <= now and (now < last_strike or chaos.owes_strikes):
            pause_s = source.uniform(0.3, 1.7) if chaos.strike() else 0.05
            next_strike = time.monotonic() + pause_s
        return all(not client.keep and client.popen is None for client in fleet.clients)

    fleet.until(all_ended, duration_s + 900)


def check_results(
    files: list[tuple[Path, Path]], num_requests: int, expected: list[list[int]]
) -> None:
    results = [each for _, path in files for each in ended(path)]
    assert sorted(each["number"] for each in results) == list(range(num_requests)), "once each"
    prompt_of = {
        number: prompt
        for plan, _ in files
        for number, prompt, _ in json.loads(plan.read_text())["requests"]
    }
    for each in results:
        assert each["tokens"] == expected[prompt_of[each["number"]]], each["number"]


def settled_stats(fleet: ProcessFleet) -> dict[str, Any]:
    """The coordinator's word when all ranks are back, with nothing left anywhere."""
    stats: dict[str, Any] = {}

    def settled() -> bool:
        nonlocal stats
        stats = stats_of(fleet)
        fields = ("load", "running", "waiting", "kv_used_blocks")
        return stats.get("live_ranks") == len(fleet.engines) and not (
            stats["requests"]
            or any(rank[name] for rank in stats["ranks"] for name in fields)
            or any(rank["kv_total_blocks"] != 63 for rank in stats["ranks"])
        )

    fleet.until(settled)
    return stats


def stats_of(fleet: ProcessFleet) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        client = Client(fleet.address)
        try:
            await client.start(0.5)
            return await client.stats(timeout_s=0.5)
        finally:
            await client.close()

    try:
        return asyncio.run(ask())
    except Exception as error:
        return {"error": repr(error)}


def report_of(
    files: list[tuple[Path, Path]], chaos: Chaos, fleet: ProcessFleet, stats: dict[str, Any]
) -> dict[str, Any]:
    results = [each for _, path in files for each in ended(path)]
    attempts = Counter(each["attempts"] for each in results)
    return {
        "requests": len(results),
        "resubmitted requests": sum(count for n, count in attempts.items() if n > 1),
        "resubmissions": sum((n - 1) * count for n, count in attempts.items()),
        "most attempts": max(attempts),
        "tried again by the application": sum(each["refusals"] > 0 for each in results),
        "strikes in work": chaos.num_in_work,
        "strikes": dict(sorted(chaos.done.items())),
        "process starts": sum(process.num_starts for process in fleet.processes),
        "requests of the last coordinator": stats["submitted"],
    }


def test_nothing_is_lost_or_repeated_while_everything_is_killed(tmp_path: Path):
    report = run_chaos(tmp_path, num_engines=3, num_requests=120, duration_s=10.0, seed=SEED)
    print(report)
    assert report["strikes in work"] >= len(SURE_STRIKES)
    assert report["resubmissions"] > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        seed = int(sys.argv[1]) if len(sys.argv) > 1 else SEED
        report = run_chaos(
            Path(scratch), num_engines=4, num_requests=2000, duration_s=60.0, seed=seed
        )
        print(json.dumps(report))
