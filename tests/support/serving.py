"""A whole `homing serve` family of real processes, for tests that use or kill them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil

READY = re.compile(r"Homing is ready: (http://\S+) ")
START_TIMEOUT_S = 180.0
"""The very first start converts the demo model."""


@dataclass
class Serving:
    """A running family. `log` is the path of everything the processes wrote to stderr."""

    process: subprocess.Popen[str]
    log: Path
    base_url: str = ""
    family: set[psutil.Process] = field(default_factory=set)
    """Every process that was ever seen in it."""

    def children(self, module: str) -> list[psutil.Process]:
        """Live processes `python -m homing.<module>`, oldest first."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if f"homing.{module}" in _arguments(child)
        ]
        self.family.update(found)
        return sorted(found, key=lambda child: child.create_time())

    def kill(self, module: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal one of the children; returns its pid."""
        victim = self.children(module)[index]
        victim.send_signal(number)
        return victim.pid

    def metrics(self) -> dict[str, float]:
        """`/metrics` as name{labels} -> value."""
        text = httpx.get(f"{self.base_url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        return sum(v for key, v in self.metrics().items() if key.split("{")[0] == name)

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.base_url}/health", timeout=60)

    def remember(self) -> None:
        """Note all processes that there are now, to look for them after the end."""
        self.family.update(psutil.Process(self.process.pid).children(recursive=True))

    def survivors(self) -> list[psutil.Process]:
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll a condition until it holds; fail naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


@contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Serving]:
    """`homing serve` with these arguments, on a free port, from its ready line to its clean end."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "stderr.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "homing.cli", "serve", *arguments, "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | (environment or {}),
            )
        server = Serving(process, log)
        try:
            server.base_url = _ready_url(process, log)
            server.remember()
            yield server
        finally:
            _stop(server)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for line in lines:
            if match := READY.search(line):
                return match[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"no ready line; exit {process.poll()}\n{log.read_text()[-5000:]}")


def _read_lines(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)


def _stop(server: Serving) -> None:
    if server.process.poll() is None:
        server.remember()
        server.process.terminate()
        try:
            server.process.wait(60)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait(30)
    if server.process.stdout is not None:
        server.process.stdout.close()
    for survivor in server.survivors():
        survivor.kill()
