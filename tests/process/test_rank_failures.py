"""Ranks that die of a prompt, hang behind a dead network, or are restarted one after another."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from array import array
from contextlib import ExitStack
from pathlib import Path

import pytest

from homing.client import Client
from homing.errors import RequestLost
from homing.params import SamplingParams
from homing.wire import Fleet, Lost, LostReason, Role
from tests.process.test_chaos import NUM_TOKENS, check_results, make_prompts, plan_clients, stats_of
from tests.support.chaos_client import ended
from tests.support.coordinator_fleet import submit
from tests.support.coordinator_process import ROOT, coordinator_process, peers
from tests.support.process_fleet import Process, ProcessFleet, greedy_answers
from tests.support.tcp_proxy import TcpProxy
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(600)


async def test_a_poison_request_kills_two_engines_and_no_third(tmp_path: Path):
    with ExitStack() as stack:
        coordinator = stack.enter_context(coordinator_process(tmp_path))
        engines = [fragile_engine(stack, coordinator.address, rank) for rank in range(3)]
        client = Client(coordinator.address)
        await client.start()
        await client.wait_for_ranks(3, timeout_s=60.0)
        poisoned = client.submit(array("I", [63, 1, 2]).tobytes(), SamplingParams())
        healthy = [
            client.submit(array("I", [number]).tobytes(), SamplingParams()) for number in range(30)
        ]
        with pytest.raises(RequestLost, match="2 engines"):
            async for _ in poisoned:
                pass
        for number, generation in enumerate(healthy):
            assert [token async for part in generation for token in part.token_ids] == [number]
        assert sum(engine.poll() is None for engine in engines) == 1
        stats = await client.stats()
        assert (stats["requests"], stats["lost_ranks"]) == (0, 2)
        await client.close()


def fragile_engine(stack: ExitStack, address: str, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.fragile_engine", address, str(rank)]
    process = stack.enter_context(subprocess.Popen(command, cwd=ROOT))
    stack.callback(process.kill)
    return process


def test_an_engine_behind_a_dead_network_is_lost_within_the_heartbeat_timeout(tmp_path: Path):
    """Its socket stays open on both sides: nothing but silence tells."""
    with (
        coordinator_process(tmp_path, "--heartbeat-timeout-s", "1.5") as coordinator,
        TcpProxy(coordinator.address) as network,
        peers(coordinator.address, Role.CLIENT) as [client],
        ExitStack() as stack,
    ):
        fragile_engine(stack, network.address, 0)
        client.hear(Fleet, live_ranks=1)
        network.freeze()
        frozen_at = time.monotonic()
        client.say(submit(client.uid))
        assert client.hear(Lost).reason is LostReason.RANK_LOST
        assert time.monotonic() - frozen_at < 10.0
        client.wait_for_stats(requests=0, lost_ranks=1)


async def test_a_client_whose_connection_is_cut_goes_on_where_it_was(tmp_path: Path):
    with ExitStack() as stack:
        coordinator = stack.enter_context(coordinator_process(tmp_path))
        network = stack.enter_context(TcpProxy(coordinator.address))
        fragile_engine(stack, coordinator.address, 0)
        client = Client(network.address)
        await client.start()
        await client.wait_for_ranks(1, timeout_s=60.0)
        for number in range(40):
            generation = client.submit(array("I", [number]).tobytes(), SamplingParams())
            if number % 4 == 0:
                network.cut()
            async with asyncio.timeout(60):
                tokens = [token async for part in generation for token in part.token_ids]
            assert tokens == [number]
        await client.close()


def test_a_rolling_restart_of_all_ranks_under_load_loses_nothing(tmp_path: Path):
    model = make_tiny_model("llama", tmp_path / "model")
    prompts = make_prompts(random.Random(3))
    expected = greedy_answers(model, prompts, NUM_TOKENS)
    with ProcessFleet(tmp_path, model, 2) as fleet:
        fleet.until(lambda: stats_of(fleet).get("live_ranks") == 2)
        files = plan_clients(tmp_path, fleet.address, prompts, 60, 6.0)
        for number, (plan, results) in enumerate(files):
            argv = [sys.executable, "-m", "tests.support.chaos_client", str(plan), str(results)]
            fleet.clients.append(Process(f"client-{number}", argv))
        fleet.until(lambda: stats_of(fleet).get("requests", 0) > 0)
        for engine in fleet.engines:
            engine.signal(signal.SIGTERM)
            fleet.until(lambda: bool(engine.codes))  # noqa: B023 - called in this turn
            fleet.until(lambda: stats_of(fleet).get("live_ranks") == 2)
        fleet.until(lambda: all(not client.keep for client in fleet.clients), 240)
        check_results(files, 60, expected)
        assert [engine.codes for engine in fleet.engines] == [[0], [0]]
        stats = stats_of(fleet)
        assert (stats["lost_ranks"], stats["requests"]) == (0, 0)
        results = [each for _, path in files for each in ended(path)]
        assert not any(each["refusals"] for each in results), json.dumps(results)[-2000:]
