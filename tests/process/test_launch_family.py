"""The supervisor with small processes in place of the services: what ends, what starts again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from homing.errors import ConfigError, HomingError, Unavailable
from homing.launch.family import Child, Command, Family
from homing.observe import EXIT_CONFIG_ERROR

DEADLINE_S = 60.0


def running(name: str, code: str, *, stop_timeout_s: float = 10.0) -> Command:
    """A process that runs `code`."""
    argv = [sys.executable, "-c", code]
    return Command(name=name, argv=argv, stop_timeout_s=stop_timeout_s)


def until_killed(started: Path) -> str:
    """Ends by any signal; a line in `started` says that it runs."""
    return f"import signal; open({str(started)!r}, 'a').write('x\\n'); signal.pause()"


def deaf(started: Path) -> str:
    """As `until_killed`, but SIGTERM does nothing."""
    return f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{until_killed(started)}"


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def kept_running(family: Family) -> AsyncIterator[asyncio.Task]:
    keeper = asyncio.create_task(family.keep_running())
    try:
        yield keeper
    finally:
        keeper.cancel()
        with suppress(asyncio.CancelledError, HomingError):
            await keeper
        family.kill()
        await family.stop()


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def pid_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


async def test_a_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    started = tmp_path / "started"
    family = Family([[running("engine-0", until_killed(started))]])
    async with kept_running(family):
        await eventually(lambda: lines(started) == 1)
        (child,) = family.children
        first = pid_of(child)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: lines(started) == 2)
        assert pid_of(child) != first


async def test_a_process_that_refuses_its_settings_ends_the_launch(tmp_path: Path) -> None:
    started = tmp_path / "started"
    refusing = running("engine-1", f"raise SystemExit({EXIT_CONFIG_ERROR})")
    family = Family([[running("engine-0", until_killed(started)), refusing]])
    async with kept_running(family) as keeper:
        with pytest.raises(ConfigError, match="engine-1 cannot run with these settings"):
            await asyncio.wait_for(asyncio.shield(keeper), DEADLINE_S)


async def test_a_process_that_never_starts_ends_the_launch(tmp_path: Path) -> None:
    family = Family([[running("engine-0", "raise SystemExit(7)")]])
    async with kept_running(family) as keeper:
        with pytest.raises(Unavailable, match="exited with code 7, 5 times in a row"):
            await asyncio.wait_for(asyncio.shield(keeper), DEADLINE_S)


async def test_once_the_fleet_has_served_no_death_ends_the_launch(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'a').write('x\\n'); raise SystemExit({EXIT_CONFIG_ERROR})"
    family = Family([[running("engine-0", code)]])
    family.mark_ready()
    async with kept_running(family) as keeper:
        await eventually(lambda: lines(started) >= 3)
        assert not keeper.done()


async def test_groups_stop_in_order(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"

    def noting(name: str) -> Command:
        code = (
            "import signal, time\n"
            f"note = lambda *_: (open({str(stopped)!r}, 'a').write('{name}\\n'), exit())\n"
            "signal.signal(signal.SIGTERM, note)\n"
            f"open({str(tmp_path / name)!r}, 'w')\n"
            "while True: signal.pause()"
        )
        return running(name, code)

    family = Family([[noting("frontend-0")], [noting("engine-0")], [noting("coordinator")]])
    async with kept_running(family) as keeper:
        names = ["frontend-0", "engine-0", "coordinator"]
        await eventually(lambda: all((tmp_path / name).exists() for name in names))
        keeper.cancel()
        await asyncio.wait([keeper])
        await family.stop()
        assert stopped.read_text().split() == names


async def test_a_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    family = Family([[running("engine-0", deaf(started), stop_timeout_s=0.1)]])
    async with kept_running(family) as keeper:
        await eventually(lambda: lines(started) == 1)
        keeper.cancel()
        await asyncio.wait([keeper])
        await family.stop()
        (child,) = family.children
        assert child.process is not None
        assert child.process.returncode == -signal.SIGKILL


async def test_a_kill_ends_a_stop_that_waits(tmp_path: Path) -> None:
    started = tmp_path / "started"
    family = Family([[running("frontend-0", deaf(started), stop_timeout_s=1000.0)]])
    async with kept_running(family) as keeper:
        await eventually(lambda: lines(started) == 1)
        keeper.cancel()
        await asyncio.wait([keeper])
        stopping = asyncio.create_task(family.stop())
        await asyncio.sleep(0)
        family.kill()
        await asyncio.wait_for(stopping, DEADLINE_S)


async def test_a_terminals_interrupt_does_not_reach_the_children(tmp_path: Path) -> None:
    started = tmp_path / "started"
    family = Family([[running("engine-0", until_killed(started))]])
    async with kept_running(family):
        await eventually(lambda: lines(started) == 1)
        (child,) = family.children
        assert os.getsid(pid_of(child)) != os.getsid(0)
