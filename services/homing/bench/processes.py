"""The processes of one bench, which end with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


class Processes:
    """Each holds the lifeline: none outlives the process that started it."""

    def __init__(self, folder: Path, lifeline_fd: int) -> None:
        self._folder = folder
        self._lifeline_fd = lifeline_fd
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self, module: str, *words: str, fds: tuple[int, ...] = (), quiet: bool = False
    ) -> subprocess.Popen[str]:
        """`python -m module words`; it inherits `fds` and, unless `quiet`, stderr."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words, "--lifeline-fd", str(self._lifeline_fd)],
            pass_fds=[self._lifeline_fd, *fds],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )
        self._processes.append(process)
        return process

    def address(self, name: str) -> str:
        """For a socket of these processes alone."""
        return f"ipc://{self._folder / name}"

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()


@contextmanager
def processes() -> Iterator[Processes]:
    """Processes that are stopped when the block ends."""
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryDirectory(prefix="homing-bench-") as folder:
        family = Processes(Path(folder), read_fd)
        try:
            yield family
        finally:
            family.stop()
            os.close(write_fd)
            os.close(read_fd)


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """What the process has used so far, all its threads and the kernel for it included."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system
