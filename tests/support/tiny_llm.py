"""A tiny model for tests of the Python API, and what they look at around it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from homing.llm import EngineConfig, SamplingParams

SMALL = EngineConfig(
    buffer_size_gb=0.02, max_requests=8, max_tokens=64, dtype="fp32", num_threads=1
)
PROMPTS: list[str | list[int]] = [
    "The capital of France is",
    [5, 6, 7],
    "Once upon a time",
    "Tokens, tokens, tokens",
]


def greedy(num_tokens: int = 12, **asked: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, temperature=0.0, **asked)


def children(module: str = "") -> list[psutil.Process]:
    """The processes `python -m homing.<module>` below this one."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        try:
            if f"homing.{module}" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue  # it has just ended
    return found


def processes_of(model: Path) -> list[psutil.Process]:
    """All processes on this machine that have a path below `model` on their command line."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if is_alive and any(str(model) in word for word in words):
            found.append(process)
    return found


def wait_until_none(model: Path, timeout_s: float = 30.0) -> None:
    """Fail unless nothing runs with this model any more, soon."""
    deadline = time.monotonic() + timeout_s
    while left := processes_of(model):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)
