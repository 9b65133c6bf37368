"""The processes of one launch: each kept running, all stopped in order.

Children have sessions of their own, so Ctrl-C in a terminal reaches the launcher alone and the
shutdown is the launcher's to order. Each holds the read end of the lifeline: should the launcher be
killed outright, they see its end and stop by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from homing.errors import ConfigError, Unavailable
from homing.launch.restart import MAX_STARTS, Restarts
from homing.observe import EXIT_CONFIG_ERROR

logger = logging.getLogger(__name__)

# Not sys.stderr: in a notebook it is no file.
STDERR_FD = 2


@dataclass(frozen=True)
class Command:
    """How to start one process."""

    name: str  # as in its logs: "engine-0"
    argv: Sequence[str]
    stop_timeout_s: float  # from SIGTERM to SIGKILL
    pass_fds: Sequence[int] = ()


class Child:
    """One process and its successors."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.process: asyncio.subprocess.Process | None = None
        self._restarts = Restarts()

    async def keep_running(self, ready: asyncio.Event) -> None:
        """Start the process again whenever it ends; cancel this to end that, not the process.

        While `ready` is not set, raises ConfigError if it says that it cannot run so, Unavailable
        if it dies MAX_STARTS times in a row. Once the fleet has served, one rank's trouble, be it a
        full disk or a prompt that kills engines, is no reason to stop the others.
        """
        while True:
            started = time.monotonic()
            self.process = await asyncio.create_subprocess_exec(
                *self.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=STDERR_FD,  # stdout has the ready line alone
                pass_fds=self.command.pass_fds,
                start_new_session=True,
            )
            code = await self.process.wait()
            delay_s = self._restarts.record_exit(time.monotonic() - started)
            if not ready.is_set():
                self._check_can_start(code)
            logger.warning("%s %s: starting it again", self.command.name, describe_exit(code))
            await asyncio.sleep(delay_s)

    def _check_can_start(self, code: int) -> None:
        name = self.command.name
        if code == EXIT_CONFIG_ERROR:
            raise ConfigError(f"{name} cannot run with these settings; its error is above")
        if self._restarts.failures >= MAX_STARTS:
            raise Unavailable(
                f"{name} {describe_exit(code)}, {MAX_STARTS} times in a row; its log is above"
            )

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process if it runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def stop(self) -> None:
        """SIGTERM, time to finish, SIGKILL. Nothing may restart it any more."""
        if self.process is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), self.command.stop_timeout_s)
        except TimeoutError:
            logger.warning("%s does not stop: killing it", self.command.name)
            self.send_signal(signal.SIGKILL)
            await self.process.wait()


class Family:
    """All processes of one launch.

    `stop_order` lists groups, first to stop first: those of one group stop at the same time.
    """

    def __init__(self, stop_order: Sequence[Sequence[Command]]) -> None:
        self._groups = [[Child(command) for command in group] for group in stop_order]
        self._ready = asyncio.Event()

    @property
    def children(self) -> Iterable[Child]:
        return (child for group in self._groups for child in group)

    async def keep_running(self) -> None:
        """Start everything and keep it running. Returns only by an error or by being cancelled."""
        keepers = [asyncio.create_task(child.keep_running(self._ready)) for child in self.children]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                # Once: one that is being cancelled waits for a process that it had just started.
                if not keeper.cancelling():
                    keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    def mark_ready(self) -> None:
        """The fleet serves: from now on no child's death ends the launch."""
        self._ready.set()

    async def stop(self) -> None:
        """Stop all processes, group after group. `keep_running` must have ended."""
        for group in self._groups:
            await asyncio.gather(*(child.stop() for child in group))

    def kill(self) -> None:
        """SIGKILL to every process at once."""
        for child in self.children:
            child.send_signal(signal.SIGKILL)


def describe_exit(code: int) -> str:
    """`code` as asyncio gives it: negative when a signal ended the process."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal.Signals(-code).name}"
