"""Garbage without end at the coordinator's socket, before and after Hello: nobody else notices.

The short form runs with the other tests. A million frames:

    python -m tests.process.test_garbage_flood [FRAMES]
"""

from __future__ import annotations

import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from homing.transport import Dealer, peer_identity
from homing.wire import (
    PROTOCOL_VERSION,
    Drain,
    Hello,
    Lost,
    Output,
    Role,
    Submit,
    Welcome,
    pack,
    parse,
)
from tests.support.coordinator_fleet import output, submit
from tests.support.coordinator_process import CoordinatorProcess, Peer, coordinator_process, peers
from tests.wire.test_golden_bytes import GOLDEN

pytestmark = pytest.mark.timeout(300)

BURST = 500
MAX_GROWTH_BYTES = 32 * 2**20
"""Over the last two thirds: what waits to be read takes room that the allocator keeps."""

# What makes a valid command of a frame would be obeyed: who may send it at all is another matter.
COMMANDS = ("Control", "Drain", "AbortMatching", "Goodbye")
TEMPLATES = [
    [bytes(frame) for frame in pack(message)]
    for message, *_ in GOLDEN
    if type(message).__name__ not in COMMANDS
]


def garbage(source: random.Random) -> list[bytes]:
    """Random frames, or a message in which bytes, frames or lengths were changed."""
    if source.random() < 0.3:
        return [source.randbytes(source.randrange(60)) for _ in range(source.randrange(1, 6))]
    frames = list(source.choice(TEMPLATES))
    for _ in range(source.randrange(1, 4)):
        kind, index = source.randrange(4), source.randrange(len(frames))
        frame = bytearray(frames[index])
        if kind == 0 and frame:
            frame[source.randrange(len(frame))] = source.randrange(256)
        elif kind == 1:
            frame = frame[: source.randrange(len(frame) + 1)]
        elif kind == 2:
            frames.insert(index, source.randbytes(4))
        else:
            frame += source.randbytes(source.randrange(1, 700))
        frames[index] = bytes(frame)
    return frames


def flood(
    coordinator: CoordinatorProcess, num_frames: int, serve: Callable[[int], None]
) -> Iterator[int]:
    """Send garbage as a stranger, as a client and as an engine that gets no work; serve a good
    client in between. Yields the coordinator's memory in bytes, now and then."""
    source = random.Random(7)
    process = psutil.Process(coordinator.process.pid)
    dealers = [
        Dealer(coordinator.address, peer_identity(role, secrets.randbits(63)))
        for role in ("client", "client", "engine")
    ]
    sent = turn = 0
    while sent < num_frames:
        for dealer in dealers:
            for _ in range(BURST):
                frames = garbage(source)
                dealer.send(frames)
                sent += len(frames)
            for frames in dealer.receive(0):
                parse(frames)
        turn += 1
        serve(turn)
        yield process.memory_info().rss
    for dealer in dealers:
        dealer.close()


def run_flood(directory: Path, num_frames: int) -> dict[str, float]:
    with (
        coordinator_process(directory) as coordinator,
        peers(coordinator.address, Role.ENGINE, Role.CLIENT) as (engine, client),
    ):
        bad = Peer(coordinator.address, Role.ENGINE, rank=9)
        bad.join()
        bad.say(Drain(0, None, 1000.0))
        started = time.monotonic()
        memory = []
        for rss in flood(coordinator, num_frames, lambda turn: answer_one(engine, client, turn)):
            memory.append(rss)
            bad.dealer.send(garbage(random.Random(len(memory))))
        stats = client.stats()
        assert stats["requests"] == 0
        assert not [m for m in client._heard if isinstance(m, Lost)]
        bad.dealer.close()
        warm = memory[len(memory) // 3]
        assert memory[-1] - warm < MAX_GROWTH_BYTES, memory
        return {
            "frames": num_frames,
            "dropped": stats["garbage"],
            "served": len(memory),
            "seconds": round(time.monotonic() - started, 1),
            "grown_bytes": memory[-1] - warm,
        }


def answer_one(engine: Peer, client: Peer, number: int) -> None:
    client.say(submit(client.uid, number))
    assert engine.hear(Submit, request_id=number).client == client.uid
    engine.say(output((number, 0), client=client.uid))
    assert client.hear(Output).num_finished == 1


def test_a_flood_of_garbage_disturbs_nobody_and_leaves_nothing(tmp_path: Path):
    report = run_flood(tmp_path, 60_000)
    assert report["dropped"] > 5_000


def test_who_takes_over_an_identity_ends_its_session_and_no_other(tmp_path: Path):
    """Two sockets of one identity: the second is heard, the first has to begin anew."""
    with (
        coordinator_process(tmp_path) as coordinator,
        peers(coordinator.address, Role.ENGINE, Role.CLIENT, Role.CLIENT) as (engine, first, other),
    ):
        other.say(submit(other.uid, 1))
        engine.hear(Submit)
        double = Dealer(coordinator.address, peer_identity(Role.CLIENT.value, first.uid))
        for _ in range(3):  # and a Hello that is replayed
            double.send(pack(Hello(PROTOCOL_VERSION, Role.CLIENT, first.uid, 0)))
        deadline = time.monotonic() + 60
        welcomes = 0
        while welcomes < 3:
            assert time.monotonic() < deadline
            welcomes += sum(isinstance(parse(f), Welcome) for f in double.receive(0.1))
        engine.say(output((1, 0), client=other.uid))
        assert other.hear(Output).num_finished == 1
        assert other.stats()["clients"] == 2
        double.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(run_flood(Path(scratch), int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
