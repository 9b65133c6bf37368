"""Draining: a rank that finishes what it has, gets nothing more, and goes.

    client --Drain--> coordinator --Drain--> engine
    engine --Drain--> coordinator --Drain--> engine          where it asks by itself
    client <-Drained- coordinator <-Goodbye- engine          when it is idle, or its time is up

The engine's Goodbye hands over what it did not finish: its clients submit that elsewhere.
"""

from __future__ import annotations

import logging

from homing.coordinator.admission import Admission
from homing.coordinator.events import Outbox, Send
from homing.coordinator.records import Client, Engine
from homing.wire import Drain, Drained

log = logging.getLogger(__name__)

LONGEST_S = 86_400.0


class Draining:
    def __init__(self, admission: Admission, outbox: Outbox) -> None:
        self._admission = admission
        self._outbox = outbox
        self._askers: dict[Engine, list[tuple[Client, int]]] = {}

    def ask(self, client: Client, message: Drain, engine: Engine | None) -> None:
        """A client wants this rank to go; it is answered when the rank has gone."""
        if engine is None:
            self._answer(client, message.token, f"there is no rank {message.rank}")
        elif not 0.0 <= message.timeout_s <= LONGEST_S:
            limits = f"it must be from 0 to {LONGEST_S:g}"
            self._answer(client, message.token, f"timeout_s is {message.timeout_s}; {limits}")
        else:
            self._askers.setdefault(engine, []).append((client, message.token))
            self.begin(engine, message.timeout_s)

    def begin(self, engine: Engine, timeout_s: float) -> None:
        """It gets no more requests from now on, and learns that none follows."""
        if not engine.leaving:
            extra = {"peer": str(engine), "requests": len(engine.requests), "timeout_s": timeout_s}
            log.info("drains", extra=extra)
        engine.leaving = True
        self._admission.is_stale = True
        self._outbox.append(Send(engine.identity, Drain(0, None, timeout_s)))

    def ended(self, engine: Engine, *, left: bool) -> None:
        """Its session is over; `left`: by its own word."""
        for client, token in self._askers.pop(engine, ()):
            self._answer(client, token, None if left else f"{engine} did not leave but was lost")

    def _answer(self, client: Client, token: int, problem: str | None) -> None:
        done = Drained(token, problem is None, problem or "")
        self._outbox.append(Send(client.identity, done))
