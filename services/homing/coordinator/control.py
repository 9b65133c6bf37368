"""FleetControl: commands to the whole fleet, one at a time, each answered once.

    client --Control(its sequence)--> coordinator --Control(fleet's sequence)--> every engine
    client <--ControlDone------------ coordinator <--ControlDone---------------- every engine

The fleet's state changes when a command is sent out: whoever joins from then on is told to reach
it. A rank that dies counts as having answered, and one that does not answer in time is taken for
dead. A command that comes while another is being carried out waits its turn; the same one from the
same client again is ignored, it will be answered once. Only a pause that waits for requests to end
gives way to a command that would end the waiting.

An update of the weights is told in two phases, see `weights`; its client is answered after both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from homing.coordinator.commands import (
    ANSWER_TIMEOUT_S,
    ENDS_A_WAIT,
    REFUSALS,
    TRANSITIONS,
    UPDATE_TIMEOUT_S,
    WAY,
    Operation,
)
from homing.coordinator.events import Outbox, Send
from homing.coordinator.history import History
from homing.coordinator.records import Client, Engine, Owed
from homing.coordinator.weights import FleetWeights
from homing.errors import NotAllowed, WireError
from homing.wire import (
    Command,
    Control,
    ControlDone,
    FleetState,
    Payload,
    UpdatePhase,
    UpdateWeights,
    WeightSource,
    pack_payload,
    read_payload,
)
from homing.wire.messages import clip

MAX_WAITING = 64
"""Commands that may wait their turn; more are answered as failed."""

MAX_SEQUENCE = 2**53
"""What an engine may claim to have followed: far from the largest number on the wire."""

_EMPTY_MAP = b"\x80"


class FleetControl:
    def __init__(self, outbox: Outbox, history: History) -> None:
        self.state = FleetState.RUNNING
        self.weights = FleetWeights()
        self.epoch_moved = False
        """Set here; the caller does what follows from it, and clears it."""
        self.sequence = 0
        """Of the last command sent to any engine."""
        self._last_reset = 0  # sequence of the last command that emptied the caches
        self._suspension: Payload = None  # arguments of the last SUSPEND
        self._commanded = False
        self._active: Operation | None = None
        self.waiting: deque[Operation] = deque()
        """Commands that have not begun."""
        self._outbox = outbox
        self._history = history

    def __str__(self) -> str:
        return "the fleet"

    def is_in_step(self, engine: Engine) -> bool:
        """It is in the fleet's state, with the fleet's weights."""
        return engine.fleet_state is self.state and engine.epoch == self.weights.epoch

    def will_be_in_step(self, engine: Engine) -> bool:
        """It has the fleet's weights, or is told already to take them."""
        epochs = (engine.epoch, *(owed.epoch for owed in engine.owed.values()))
        return self.weights.epoch in epochs

    # A command's way: asked, begun, answered by each engine, answered

    def request(self, client: Client, message: Control) -> None:
        """A client's command; `start_next` carries it out when its turn comes."""
        for known in (*self.waiting, *filter(None, [self._active])):
            if known.client is client and known.client_sequence == message.sequence:
                return
        operation = Operation(client, message.sequence, message.command, message.arguments)
        if len(self.waiting) >= MAX_WAITING:
            self._refuse(operation, f"{MAX_WAITING} commands are waiting already")
        else:
            self.waiting.append(operation)

    @property
    def is_next_due(self) -> bool:
        """A command waits, and none that it must wait for is being carried out."""
        if not self.waiting:
            return False
        active = self._active
        return active is None or (
            active.waits_for_requests and any(o.command in ENDS_A_WAIT for o in self.waiting)
        )

    def start_next(self, engines: Iterable[Engine], now: float) -> Operation | None:
        """Send out the command that is due. Returns it; None if it is refused."""
        if self._active is not None:
            self._refuse(self._active, "another command came before every request had ended")
            self._active = None
        operation = self.waiting.popleft()
        try:
            epoch = self._check(operation)
        except NotAllowed as refusal:
            self._refuse(operation, str(refusal))
            return None
        self._active = operation
        self._note_start(operation)
        for engine in engines:
            # An epoch is not set on older weights: whoever has them is told on its way here.
            if epoch is None or engine.epoch == self.weights.epoch:
                self._tell_operation(engine, operation, now, epoch)
        if epoch is not None:
            self.weights.epoch = epoch
            self.epoch_moved = True
        self._go_on(now)
        return operation

    def _check(self, operation: Operation) -> int | None:
        """The epoch that the command sets at once, if any. Raises NotAllowed."""
        if refusal := REFUSALS.get((self.state, operation.command)):
            raise NotAllowed(refusal)
        if operation.command is Command.UPDATE_WEIGHTS:
            operation.update = self.weights.checked_update(operation.arguments)
            operation.arguments = pack_payload(operation.update)
        if operation.command is Command.SET_EPOCH:
            return self.weights.checked_epoch(operation.arguments)
        return None

    def _note_start(self, operation: Operation) -> None:
        self._history.move(TRANSITIONS, self, operation.command)
        self._commanded = True
        operation.sequence = self._next_sequence()
        if operation.empties_caches:
            self._last_reset = self.sequence
        if operation.command is Command.SUSPEND:
            self._suspension = operation.arguments

    def done(self, engine: Engine, message: ControlDone, now: float) -> None:
        """An engine's answer. One that nobody waits for is ignored."""
        owed = engine.owed.pop(message.sequence, None)
        if owed is None:
            return
        if message.ok:
            state = TRANSITIONS.get((engine.fleet_state, message.command))
            engine.fleet_state = state or engine.fleet_state
            if owed.epoch is not None:
                engine.epoch = owed.epoch
                if not engine.owed:  # the fleet's epoch may have moved on meanwhile
                    self._bring_to_epoch(engine, now)
        operation = self._active
        if operation is not None and operation.sequence == message.sequence:
            operation.awaited.discard(engine)
            self._note_answer(operation, engine, message)
            self._go_on(now)

    def _note_answer(self, operation: Operation, engine: Engine, message: ControlDone) -> None:
        # A rank with older weights waits for some that it can use: if not these, then the next.
        is_waiting = operation.update is not None and engine.epoch < self.weights.epoch
        if not message.ok and not is_waiting:
            operation.problems.append(f"{engine}: {message.detail}")
        elif message.ok and operation.update:
            operation.prepared.append(engine)
        results = bytes(message.results or _EMPTY_MAP)
        try:
            read_payload(results, dict[str, Any])
        except WireError as error:
            results = _EMPTY_MAP
            operation.problems.append(f"{engine}: results: {error}")
        operation.results.setdefault(engine.rank, Raw(results))

    def _go_on(self, now: float) -> None:
        """Once every engine has answered: the update's second phase, or the client's answer."""
        operation = self._active
        if operation is None or operation.awaited:
            return
        if operation.update is not None:
            self._decide(operation, operation.update, now)
            operation.update = None
        if not operation.awaited:
            self._active = None
            self._answer(operation)

    def _decide(self, operation: Operation, update: UpdateWeights, now: float) -> None:
        """All have prepared the update, or some could not."""
        if not operation.prepared and not operation.problems:
            operation.problems.append("no rank could take the weights")
        is_good = not operation.problems
        phase = UpdatePhase.COMMIT if is_good else UpdatePhase.ROLLBACK
        operation.arguments = pack_payload(replace(update, phase=phase))
        operation.sequence = self._next_sequence()
        for engine in operation.prepared:
            self._tell_operation(engine, operation, now, update.epoch if is_good else None)
        if is_good:
            self.weights.committed(update)
            self.epoch_moved = True

    def forget_engine(self, engine: Engine, now: float) -> None:
        """An engine that is gone owes no answer."""
        operation = self._active
        if operation is None:
            return
        if engine in operation.prepared:
            operation.prepared.remove(engine)
        if engine in operation.awaited:
            operation.awaited.remove(engine)
            operation.results[engine.rank] = Raw(pack_payload({"lost": True}))
            self._go_on(now)

    def forget_client(self, client: Client) -> None:
        """Commands of a client that is gone are not begun; one that was begun goes on."""
        self.waiting = deque(o for o in self.waiting if o.client is not client)

    def overdue(self, engines: Iterable[Engine], now: float) -> list[Engine]:
        """The engines that have not carried out a command in time."""
        return [
            engine
            for engine in engines
            if engine.owed and now > min(owed.deadline for owed in engine.owed.values())
        ]

    # Engines that join

    def catch_up(self, engine: Engine, others: Iterable[Engine], now: float) -> None:
        """Tell an engine that joins what it must do to be in step, if anything helps.

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
        self.epoch_moved |= self.weights.adopt(said.epoch, said.weights)
        if said.control_sequence < self._last_reset and said.incarnation > 0:
            # It was away when the others dropped their caches, and may have kept its own.
            self._tell(engine, Command.RESET_PREFIX_CACHE, now)
        self._bring_to_epoch(engine, now)
        self._bring_to_state(engine, now)
        operation = self._active
        if operation and operation.update and operation.update.source is not WeightSource.GROUP:
            self._tell_operation(engine, operation, now, None)

    def _bring_to_epoch(self, engine: Engine, now: float) -> None:
        for step, epoch in self.weights.steps_from(engine.epoch):
            command = (
                Command.UPDATE_WEIGHTS if isinstance(step, UpdateWeights) else Command.SET_EPOCH
            )
            self._tell(
                engine, command, now, pack_payload(step), timeout_s=UPDATE_TIMEOUT_S, epoch=epoch
            )

    def _bring_to_state(self, engine: Engine, now: float) -> None:
        for command in WAY.get((engine.fleet_state, self.state), ()):
            self._tell(
                engine, command, now, self._suspension if command is Command.SUSPEND else None
            )

    # What goes out

    def _next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def _tell_operation(
        self, engine: Engine, operation: Operation, now: float, epoch: int | None
    ) -> None:
        assert operation.sequence is not None
        operation.awaited.add(engine)
        engine.owed[operation.sequence] = Owed(now + operation.timeout_s, epoch)
        control = Control(operation.command, operation.sequence, operation.arguments)
        self._outbox.append(Send(engine.identity, control))

    def _tell(
        self,
        engine: Engine,
        command: Command,
        now: float,
        arguments: Payload = None,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        epoch: int | None = None,
    ) -> None:
        """Tell one engine, on its way into the fleet."""
        sequence = self._next_sequence()
        engine.owed[sequence] = Owed(now + timeout_s, epoch)
        self._outbox.append(Send(engine.identity, Control(command, sequence, arguments)))

    def _refuse(self, operation: Operation, why: str) -> None:
        operation.problems.append(why)
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
