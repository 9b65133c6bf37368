"""What the fleet's commands do: the table of its states, and what else must be known of each
command before it is carried out. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Raw

from homing.coordinator.records import Client, Engine
from homing.errors import WireError
from homing.wire import (
    Command,
    FleetState,
    KVMode,
    Pause,
    PauseMode,
    Payload,
    Suspend,
    UpdateWeights,
    read_payload,
)

ANSWER_TIMEOUT_S = 60.0
"""An engine that shows that it is alive but does not carry out a command for so long is broken."""

UPDATE_TIMEOUT_S = 900.0
"""The same, for an update of the weights: it may read them from a slow disk."""

_S, _C = FleetState, Command
_ANYWHERE = (_C.UPDATE_WEIGHTS, _C.SET_EPOCH, _C.RESET_PREFIX_CACHE, _C.RESET, _C.SHUTDOWN)
TRANSITIONS: dict[tuple[FleetState, Command], FleetState] = {
    (_S.RUNNING, _C.PAUSE): _S.PAUSED,
    (_S.PAUSED, _C.UNPAUSE): _S.RUNNING,
    (_S.PAUSED, _C.SUSPEND): _S.SUSPENDED,
    (_S.SUSPENDED, _C.RESUME): _S.PAUSED,
    # Repeats. A suspension may be repeated to give back more.
    (_S.RUNNING, _C.UNPAUSE): _S.RUNNING,
    (_S.PAUSED, _C.PAUSE): _S.PAUSED,
    (_S.PAUSED, _C.RESUME): _S.PAUSED,
    (_S.SUSPENDED, _C.PAUSE): _S.SUSPENDED,
    (_S.SUSPENDED, _C.SUSPEND): _S.SUSPENDED,
    **{(state, command): state for state in FleetState for command in _ANYWHERE},
}
REFUSALS: dict[tuple[FleetState, Command], str] = {
    (_S.RUNNING, _C.SUSPEND): "the fleet is running: pause it before you suspend it",
    (_S.RUNNING, _C.RESUME): "the fleet is running: there is nothing to resume",
    (_S.SUSPENDED, _C.UNPAUSE): "the fleet is suspended: resume it before you unpause it",
}
WAY: dict[tuple[FleetState, FleetState], tuple[Command, ...]] = {
    (_S.RUNNING, _S.PAUSED): (_C.PAUSE,),
    (_S.RUNNING, _S.SUSPENDED): (_C.PAUSE, _C.SUSPEND),
    (_S.PAUSED, _S.RUNNING): (_C.UNPAUSE,),
    (_S.PAUSED, _S.SUSPENDED): (_C.SUSPEND,),
    (_S.SUSPENDED, _S.PAUSED): (_C.RESUME,),
    (_S.SUSPENDED, _S.RUNNING): (_C.RESUME, _C.UNPAUSE),
}
"""How an engine that joins in one state reaches the fleet's."""

ENDS_A_WAIT = (_C.PAUSE, _C.UNPAUSE, _C.RESET, _C.SHUTDOWN)
"""What a pause that waits for requests to end gives way to."""


@dataclass(slots=True, eq=False)
class Operation:
    """A client's command and what came of it so far."""

    client: Client
    client_sequence: int
    command: Command
    arguments: Payload
    sequence: int | None = None
    """The fleet's; None while it waits its turn."""
    update: UpdateWeights | None = None
    """Of an update of the weights, while engines prepare it."""
    prepared: list[Engine] = field(default_factory=list[Engine])
    """Who has."""
    awaited: set[Engine] = field(default_factory=set[Engine])
    results: dict[int, Raw] = field(default_factory=dict[int, Raw])
    """rank -> its result map, packed"""
    problems: list[str] = field(default_factory=list[str])

    @property
    def waits_for_requests(self) -> bool:
        return (
            self.command is Command.PAUSE
            and _read_or(self.arguments, Pause()).mode is PauseMode.WAIT
        )

    @property
    def empties_caches(self) -> bool:
        if self.command is Command.SUSPEND:
            return _read_or(self.arguments, Suspend()).kv is KVMode.DISCARD
        return self.command in (Command.RESET_PREFIX_CACHE, Command.RESET)

    @property
    def timeout_s(self) -> float:
        if self.waits_for_requests:
            return math.inf
        return UPDATE_TIMEOUT_S if self.command is Command.UPDATE_WEIGHTS else ANSWER_TIMEOUT_S


T = TypeVar("T")


def _read_or(arguments: Payload, default: T) -> T:
    """The arguments; what cannot be read is for the engines to refuse."""
    try:
        return default if arguments is None else read_payload(arguments, type(default))
    except WireError:
        return default
