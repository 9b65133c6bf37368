"""A coordinator, engine ranks on a tiny model and a client: real processes, for a test to command
and to kill."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from homing.client import Client, Generation
from homing.params import SamplingParams
from homing.wire import Finish
from tests.support.coordinator_process import CoordinatorProcess

START_TIMEOUT_S = 120.0


@dataclass
class Tokens:
    """What one generation brought."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    num_cached: int = 0
    finish: Finish | None = None


class TinyFleet:
    def __init__(
        self,
        model: Path,
        directory: Path,
        coordinator: CoordinatorProcess,
        flags: Sequence[str],
        wrapper: Sequence[str] = (),
    ) -> None:
        self.client = Client(coordinator.address)
        self._model = model
        self._directory = directory
        self._coordinator = coordinator
        self._flags = flags
        self._wrapper = wrapper
        self._engines: dict[int, subprocess.Popen[bytes]] = {}

    def start_engine(self, rank: int, model: Path | None = None) -> None:
        command = [*self._wrapper, sys.executable, "-m", "homing.engine", str(model or self._model)]
        flags = [
            *("--coordinator", self._coordinator.address, "--rank", str(rank)),
            *("--served-model-name", "tiny", "--num-threads", "1", "--kv-cache-gb", "0.02"),
        ]
        with (self._directory / f"engine-{rank}.log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._engines[rank] = subprocess.Popen(
                [*command, *flags, *self._flags], stderr=log, env=environment
            )

    def kill_engine(self, rank: int) -> None:
        self._engines[rank].kill()
        self._engines[rank].wait()

    def engine_exit(self, rank: int, timeout_s: float = 60.0) -> int:
        return self._engines[rank].wait(timeout_s)

    def pid(self, rank: int) -> int:
        return self._engines[rank].pid

    def log(self, rank: int) -> str:
        return (self._directory / f"engine-{rank}.log").read_text()

    def submit(self, prompt: Sequence[int], num_tokens: int, **params: object) -> Generation:
        values: dict[str, object] = {"temperature": 0.0, "ignore_eos": True} | params
        sampling = SamplingParams(num_tokens_to_generate=num_tokens, **values)  # type: ignore[arg-type]
        return self.client.submit(array("I", prompt).tobytes(), sampling)

    async def generate(self, prompt: Sequence[int], num_tokens: int, **params: object) -> Tokens:
        return await collect(self.submit(prompt, num_tokens, **params))

    def stop(self) -> None:
        for engine in self._engines.values():
            if self._wrapper:  # unshare passes no signal on but its death
                engine.kill()
            else:
                engine.terminate()
        for engine in self._engines.values():
            try:
                engine.wait(15)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()
        self._coordinator.stop()


async def collect(generation: Generation) -> Tokens:
    tokens = Tokens()
    async for part in generation:
        tokens.ids += part.token_ids
        tokens.log_probs += part.log_probs or []
        tokens.epochs += [part.epoch] * len(part.token_ids)
        tokens.num_cached = part.num_cached_tokens or tokens.num_cached
        tokens.finish = part.finish
    return tokens


@asynccontextmanager
async def tiny_fleet(
    model: Path,
    directory: Path,
    *,
    num_ranks: int,
    flags: Sequence[str] = (),
    wrapper: Sequence[str] = (),
) -> AsyncIterator[TinyFleet]:
    """`directory` takes the logs; `flags` go to every engine, whose command follows
    `wrapper`."""
    coordinator = CoordinatorProcess(directory / "coordinator.log")
    fleet = TinyFleet(model, directory, coordinator, flags, wrapper)
    try:
        for rank in range(num_ranks):
            fleet.start_engine(rank)
        await fleet.client.start()
        await fleet.client.wait_for_ranks(num_ranks, START_TIMEOUT_S)
        yield fleet
    finally:
        await fleet.client.close()
        fleet.stop()
