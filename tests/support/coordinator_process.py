"""A real coordinator process, and peers on real sockets that a test drives by hand."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from homing.transport import Dealer, peer_identity
from homing.wire import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Message,
    Role,
    Stats,
    StatsReply,
    Welcome,
    pack,
    pack_payload,
    parse,
    read_payload,
)
from tests.support.coordinator_fleet import CARD

TIMEOUT_S = 60.0
"""For what takes milliseconds on an idle machine."""

ROOT = Path(__file__).parents[2]
BOUND = re.compile(r"bound address=(\S+)")
M = TypeVar("M", bound=Message)


class CoordinatorProcess:
    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "homing.coordinator", "--heartbeat-s", "0.1", *flags],
                stderr=stderr,
            )
        self.address = self._bound_address()

    def _bound_address(self) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if found := BOUND.findall(self.log.read_text()):
                return found[-1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)
        raise AssertionError(self.log.read_text())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(TIMEOUT_S)


@contextmanager
def coordinator_process(tmp_path: Path, *flags: str) -> Iterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(tmp_path / "coordinator.log", *flags)
    try:
        yield coordinator
    finally:
        coordinator.stop()


@contextmanager
def engine_process(address: str, rank: int) -> Iterator[psutil.Popen]:
    """An engine, for a test to kill or stop, that joins and rejoins but never answers."""
    command = [sys.executable, "-m", "tests.support.silent_engine", address, str(rank)]
    process = psutil.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Peer:
    """A client or an engine; it says only what the test makes it say."""

    def __init__(self, address: str, role: Role, *, rank: int | None = None) -> None:
        self.role, self.rank = role, rank
        self.uid = secrets.randbits(63)
        self.incarnation = 0
        self.dealer = Dealer(address, peer_identity(role.value, self.uid))
        self._heard: list[Message] = []

    def join(self) -> Welcome:
        card = pack_payload(CARD) if self.role is Role.ENGINE else None
        self.say(
            Hello(
                PROTOCOL_VERSION,
                self.role,
                self.uid,
                self.incarnation,
                self.rank,
                model_card=card,
            )
        )
        self.incarnation += 1
        return self.hear(Welcome)

    def say(self, message: Message) -> None:
        self.dealer.send(pack(message))

    def hear(self, kind: type[M], **fields: Any) -> M:
        """Wait for a message of this kind with these fields; others are kept for later."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for index, message in enumerate(self._heard):
                if isinstance(message, kind) and all(
                    getattr(message, name) == value for name, value in fields.items()
                ):
                    return self._heard.pop(index)  # type: ignore[return-value]  # it is a kind
            assert time.monotonic() < deadline, f"no {kind.__name__}; heard {self._heard}"
            self.say(Heartbeat(self.incarnation))
            for frames in self.dealer.receive(0.1):
                message = parse(frames)
                if not isinstance(message, Heartbeat) or kind is Heartbeat:
                    self._heard.append(message)

    def stats(self) -> dict[str, Any]:
        token = secrets.randbits(32)
        self.say(Stats(token))
        return read_payload(self.hear(StatsReply, token=token).snapshot or b"", dict[str, Any])

    def wait_for_stats(self, **values: Any) -> dict[str, Any]:
        """Ask until the snapshot has these values."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            stats = self.stats()
            if all(stats[name] == value for name, value in values.items()):
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)


@contextmanager
def peers(address: str, *roles: Role) -> Iterator[list[Peer]]:
    """Joined peers; engines get ranks in order."""
    joined = [Peer(address, role) for role in roles]
    try:
        for peer in joined:
            peer.join()
        yield joined
    finally:
        for peer in joined:
            peer.dealer.close()
