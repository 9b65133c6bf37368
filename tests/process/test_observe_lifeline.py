"""A child whose parent dies, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE_S = 20.0


@contextmanager
def child_on_a_lifeline(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that watches its lifeline, then runs `code`; and the end that keeps it alive."""
    read_fd, write_fd = os.pipe()
    program = (
        "import signal, sys, time\n"
        "from homing.observe import lifeline\n"
        f"lifeline.watch_lifeline({read_fd})\n" + code
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[read_fd],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        os.close(read_fd)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process, write_fd
        finally:
            process.kill()


def test_a_child_is_terminated_when_its_parents_end_closes() -> None:
    with child_on_a_lifeline("print('ready', flush=True); signal.pause()") as (child, write_fd):
        os.close(write_fd)
        assert child.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_child_that_ignores_the_request_exits_all_the_same() -> None:
    code = (
        "lifeline.GRACE_S = 0.1\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)"
    )
    with child_on_a_lifeline(code) as (child, write_fd):
        os.close(write_fd)
        assert child.wait(DEADLINE_S) == 1


def test_a_child_can_stop_in_its_own_way() -> None:
    code = (
        "import os, threading\n"
        "told = threading.Event()\n"
        "read_fd, write_fd = os.pipe()\n"
        "lifeline.watch_lifeline(read_fd, told.set)\n"
        "print('ready', flush=True)\n"
        "os.close(write_fd)\n"
        "sys.exit(7 if told.wait(20) else 8)"
    )
    with child_on_a_lifeline(code) as (child, write_fd):
        assert child.wait(DEADLINE_S) == 7
        os.close(write_fd)
