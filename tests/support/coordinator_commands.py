"""A fleet without sockets or clock that is commanded, whose engines answer when a test says so."""

from __future__ import annotations

from typing import Any

from homing.wire import (
    Command,
    Control,
    ControlDone,
    Message,
    UpdatePhase,
    UpdateWeights,
    WeightSource,
    pack_payload,
    read_payload,
)
from tests.support.coordinator_fleet import Fleet, to

PAUSE, UNPAUSE, SUSPEND, RESUME = Command.PAUSE, Command.UNPAUSE, Command.SUSPEND, Command.RESUME
UPDATE, SET_EPOCH = Command.UPDATE_WEIGHTS, Command.SET_EPOCH
PREPARE, COMMIT = UpdatePhase.PREPARE, UpdatePhase.COMMIT
ROLLBACK, APPLY = UpdatePhase.ROLLBACK, UpdatePhase.APPLY


def directory(path: str = "/new", **fields: Any) -> UpdateWeights:
    return UpdateWeights(source=WeightSource.DIRECTORY, path=path, **fields)


def update_of(message: Message) -> UpdateWeights:
    assert isinstance(message, Control)
    assert message.command is UPDATE
    return read_payload(message.arguments or b"", UpdateWeights)


def phases(peer: bytes, sent: list[tuple[bytes, Message]]) -> list[UpdatePhase]:
    return [update_of(m).phase for m in to(peer, sent) if isinstance(m, Control)]


def commands(peer: bytes, sent: list[tuple[bytes, Message]]) -> list[Command]:
    return [m.command for m in to(peer, sent) if isinstance(m, Control)]


def answers(sent: list[tuple[bytes, Message]]) -> list[tuple[bytes, bool, str]]:
    return [(peer, m.ok, m.detail) for peer, m in sent if isinstance(m, ControlDone)]


class Driver:
    """Engines that answer the last thing they were told, when the test says so."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.told: dict[bytes, list[Control]] = {}
        self.sequence = 0

    def see(self, sent: list[tuple[bytes, Message]]) -> list[tuple[bytes, Message]]:
        for peer, message in sent:
            if isinstance(message, Control):
                self.told.setdefault(peer, []).append(message)
        return sent

    def ask(
        self, command: Command, arguments: Any = None, client: bytes = b"c1"
    ) -> list[tuple[bytes, Message]]:
        self.sequence += 1
        frame = None if arguments is None else pack_payload(arguments)
        return self.see(self.fleet.say(client, Control(command, self.sequence, frame)))

    def answer(
        self, engine: bytes, *, ok: bool = True, detail: str = ""
    ) -> list[tuple[bytes, Message]]:
        """To the oldest command that it has not answered."""
        control = self.told[engine].pop(0)
        results = pack_payload({} if ok else {"error": detail})
        done = ControlDone(control.command, control.sequence, ok, detail, results)
        return self.see(self.fleet.say(engine, done))

    def all_answer(self, *engines: bytes) -> list[tuple[bytes, Message]]:
        """Until nothing is unanswered; what the coordinator said to all of it."""
        said: list[tuple[bytes, Message]] = []
        while any(self.told.get(engine) for engine in engines):
            for engine in engines:
                if self.told.get(engine):
                    said += self.answer(engine)
        return said


BOTH = (b"e0", b"e1")


def updated(driver: Driver, *updates: UpdateWeights) -> None:
    for update in updates:
        driver.ask(UPDATE, update)
        driver.all_answer(*BOTH)
