"""FleetControl: commands to the whole fleet, one at a time, each answered once.

    client --Control(its sequence)--> coordinator --Control(fleet's sequence)--> every engine
    client <--ControlDone------------ coordinator <--ControlDone---------------- every engine

The fleet's state changes when a command is sent out: whoever joins from then on is told to reach
it. A rank that dies counts as having answered, and one that does not answer in time is taken for
dead. A command that comes while another is being carried out waits its turn; the same one from the
same client again is ignored, it will be answered once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from homing.coordinator.events import Outbox, Send
from homing.coordinator.history import History
from homing.coordinator.records import Client, Engine
from homing.errors import WireError
from homing.wire import (
    Command,
    Control,
    ControlDone,
    FleetState,
    Payload,
    pack_payload,
    read_payload,
)
from homing.wire.messages import clip

MAX_WAITING = 64
"""Commands that may wait their turn; more are answered as failed."""

ANSWER_TIMEOUT_S = 60.0
"""An engine that shows that it is alive but does not carry out a command for so long is broken."""

MAX_SEQUENCE = 2**53
"""What an engine may claim to have followed: far from the largest number on the wire."""

_EMPTY_MAP = b"\x80"

_S = FleetState
TRANSITIONS: dict[tuple[FleetState, Command], FleetState] = {
    (_S.RUNNING, Command.PAUSE): _S.PAUSED,
    (_S.PAUSED, Command.PAUSE): _S.PAUSED,  # a repeat
    (_S.PAUSED, Command.UNPAUSE): _S.RUNNING,
    (_S.RUNNING, Command.UNPAUSE): _S.RUNNING,  # a repeat
    (_S.RUNNING, Command.RESET_PREFIX_CACHE): _S.RUNNING,
    (_S.PAUSED, Command.RESET_PREFIX_CACHE): _S.PAUSED,
}

COMMAND_TO_REACH = {FleetState.PAUSED: Command.PAUSE, FleetState.RUNNING: Command.UNPAUSE}


@dataclass(slots=True, eq=False)
class Operation:
    """A client's command and what came of it so far."""

    client: Client
    client_sequence: int
    command: Command
    arguments: Payload
    sequence: int | None = None
    """The fleet's; None while it waits its turn."""
    awaited: set[Engine] = field(default_factory=set[Engine])
    results: dict[int, Raw] = field(default_factory=dict[int, Raw])
    """rank -> its result map, packed"""
    problems: list[str] = field(default_factory=list[str])


class FleetControl:
    def __init__(self, outbox: Outbox, history: History) -> None:
        self.state = FleetState.RUNNING
        self.sequence = 0
        """Of the last command sent to any engine."""
        self._last_reset = 0  # sequence of the last RESET_PREFIX_CACHE
        self._commanded = False
        self._active: Operation | None = None
        self._waiting: deque[Operation] = deque()
        self._outbox = outbox
        self._history = history

    @property
    def is_next_due(self) -> bool:
        """A command waits, and none is being carried out."""
        return self._active is None and bool(self._waiting)

    def request(self, client: Client, message: Control) -> None:
        """A client's command; `start_next` carries it out when its turn comes."""
        for known in (*self._waiting, *filter(None, [self._active])):
            if known.client is client and known.client_sequence == message.sequence:
                return
        operation = Operation(client, message.sequence, message.command, message.arguments)
        if len(self._waiting) >= MAX_WAITING:
            operation.problems.append(f"{MAX_WAITING} commands are waiting already")
            self._answer(operation)
        else:
            self._waiting.append(operation)

    def start_next(self, engines: Iterable[Engine], now: float) -> Command:
        """Send out the command that is due. Returns it."""
        operation = self._active = self._waiting.popleft()
        command = operation.command
        self.state = self._history.next_state(TRANSITIONS, self.state, command, "the fleet")
        self._commanded = True
        operation.sequence = self._next_sequence()
        if command is Command.RESET_PREFIX_CACHE:
            self._last_reset = self.sequence
        for engine in engines:
            operation.awaited.add(engine)
            self._tell(engine, command, self.sequence, now, operation.arguments)
        self._finish_if_answered()
        return command

    def done(self, engine: Engine, message: ControlDone) -> None:
        """An engine's answer. One that nobody waits for is ignored."""
        if message.sequence not in engine.owed:
            return
        del engine.owed[message.sequence]
        if message.ok and message.command is not Command.RESET_PREFIX_CACHE:
            engine.fleet_state = TRANSITIONS[engine.fleet_state, message.command]
        operation = self._active
        if operation is None or operation.sequence != message.sequence:
            return
        operation.awaited.discard(engine)
        if not message.ok:
            operation.problems.append(f"{engine}: {message.detail}")
        results = bytes(message.results or _EMPTY_MAP)
        try:
            read_payload(results, dict[str, Any])
        except WireError as error:
            results = _EMPTY_MAP
            operation.problems.append(f"{engine}: results: {error}")
        operation.results[engine.rank] = Raw(results)
        self._finish_if_answered()

    def forget_engine(self, engine: Engine) -> None:
        """An engine that is gone owes no answer."""
        operation = self._active
        if operation is not None and engine in operation.awaited:
            operation.awaited.remove(engine)
            operation.results[engine.rank] = Raw(pack_payload({"lost": True}))
            self._finish_if_answered()

    def forget_client(self, client: Client) -> None:
        """Commands of a client that is gone are not begun; one that was begun goes on."""
        self._waiting = deque(o for o in self._waiting if o.client is not client)

    def overdue(self, engines: Iterable[Engine], now: float) -> list[Engine]:
        """The engines that have not carried out a command in time."""
        return [
            engine
            for engine in engines
            if engine.owed and now - min(engine.owed.values()) > ANSWER_TIMEOUT_S
        ]

    def catch_up(self, engine: Engine, others: Iterable[Engine], now: float) -> None:
        """Tell an engine that joins what it must do to be in the fleet's state, if anything.

        A coordinator that has given no command yet, because it was restarted, takes over the
        state of the engine that followed the latest command, and tells the others.
        """
        said = engine.hello
        adopted = said.control_sequence > self.sequence and not self._commanded
        self.sequence = max(self.sequence, said.control_sequence)
        if adopted:
            self.state = said.state
            for other in others:
                self._bring_to_state(other, now)
        if said.control_sequence < self._last_reset and said.incarnation > 0:
            # It was away when the others dropped their caches, and may have kept its own.
            self._tell(engine, Command.RESET_PREFIX_CACHE, self._next_sequence(), now)
        self._bring_to_state(engine, now)

    def _bring_to_state(self, engine: Engine, now: float) -> None:
        if engine.fleet_state is not self.state:
            self._tell(engine, COMMAND_TO_REACH[self.state], self._next_sequence(), now)

    def _next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def _tell(
        self,
        engine: Engine,
        command: Command,
        sequence: int,
        now: float,
        arguments: Payload = None,
    ) -> None:
        engine.owed[sequence] = now
        self._outbox.append(Send(engine.identity, Control(command, sequence, arguments)))

    def _finish_if_answered(self) -> None:
        operation = self._active
        if operation is not None and not operation.awaited:
            self._active = None
            self._answer(operation)

    def _answer(self, operation: Operation) -> None:
        done = ControlDone(
            operation.command,
            operation.client_sequence,
            ok=not operation.problems,
            detail=clip("; ".join(operation.problems)),
            results=pack_payload(operation.results),
        )
        self._outbox.append(Send(operation.client.identity, done))
