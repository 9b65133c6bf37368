"""A coordinator, product engines of a tiny model and clients, as processes: to kill, stop, restart.

Each engine reaches the coordinator through a network of its own, which can be broken too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from homing.engine.config import EngineConfig
from homing.params import SamplingParams
from tests.support.coordinator_process import ROOT, CoordinatorProcess
from tests.support.tcp_proxy import TcpProxy

START_S = 90.0
CACHE_BLOCKS = 64
CACHE_GB = (CACHE_BLOCKS + 0.5) * 12_288 / 2**30
"""Of the tiny Llama in fp32: 3 layers, 16 tokens, 2 heads of 16, keys and values."""
ENGINE_FLAGS = {"max_model_len": 256, "kv_cache_gb": CACHE_GB, "dtype": "fp32", "num_threads": 1}


@dataclass
class Process:
    """Started again when it ends, unless `keep` is False."""

    name: str
    argv: Sequence[str]
    keep: bool = True
    popen: subprocess.Popen[bytes] | None = None
    resumes_at: float | None = None
    """It is stopped until then."""
    num_starts: int = 0
    codes: list[int] = field(default_factory=list[int])

    def signal(self, number: signal.Signals) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    def stop_for(self, seconds: float) -> None:
        self.signal(signal.SIGSTOP)
        self.resumes_at = time.monotonic() + seconds

    def turn(self, log: Path) -> None:
        """Resume it when that is due; start it where it does not run."""
        if self.resumes_at is not None and time.monotonic() >= self.resumes_at:
            self.signal(signal.SIGCONT)
            self.resumes_at = None
        if self.popen is not None and (code := self.popen.poll()) is not None:
            self.codes.append(code)
            self.popen, self.resumes_at = None, None
        if self.popen is None and self.keep:
            self.num_starts += 1
            env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            with log.open("ab") as stderr:
                self.popen = subprocess.Popen(self.argv, stderr=stderr, cwd=ROOT, env=env)

    def end(self) -> None:
        self.keep = False
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        if self.popen is not None:
            self.popen.wait()


class ProcessFleet:
    def __init__(self, directory: Path, model: Path, num_engines: int, *flags: str) -> None:
        self.log = directory / "processes.log"
        first = CoordinatorProcess(directory / "coordinator.log", *flags)
        self.address = first.address
        argv = [*first.process.args, "--bind", self.address]  # type: ignore[misc]  # a list of str
        self.coordinator = Process("coordinator", argv, popen=first.process, num_starts=1)  # type: ignore[arg-type]
        self.networks = [TcpProxy(self.address) for _ in range(num_engines)]
        self.engines = [
            Process(f"engine-{rank}", engine_argv(model, network.address, rank))
            for rank, network in enumerate(self.networks)
        ]
        self.clients: list[Process] = []

    @property
    def processes(self) -> list[Process]:
        return [self.coordinator, *self.engines, *self.clients]

    def turn(self) -> None:
        for process in self.processes:
            process.turn(self.log)
        for client in self.clients:
            if client.codes and client.codes[-1] == 0:
                client.keep = False

    def until(self, holds: Callable[[], bool], timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            self.turn()
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.end()
        for network in self.networks:
            network.__exit__(None, None, None)


def engine_argv(model: Path, address: str, rank: int) -> list[str]:
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in ENGINE_FLAGS.items()}
    words = [word for pair in flags.items() for word in pair]
    argv = [sys.executable, "-m", "homing.engine", str(model)]
    return [*argv, "--coordinator", address, "--rank", str(rank), *words]


def greedy_answers(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """What each prompt's answer is, by an engine in this process that nobody disturbs."""
    from homing.engine.startup import load_engine

    engine, _ = load_engine(EngineConfig(model=str(model), coordinator="", **ENGINE_FLAGS))
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(number, np.array(prompt), params)
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished_requests:
        for output in engine.step():
            answers[output.request.key] += output.token_ids  # type: ignore[index]  # the number
    engine.close()
    return answers
