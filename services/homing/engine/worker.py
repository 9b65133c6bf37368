"""The engine process's loop: receive, handle, schedule, run, send.

One thread, which waits for nothing but its socket, and for the device. While an accelerator
computes a step, the one before is answered, new requests are taken on, and the next step is
prepared; so answers are sent a moment later, and the device waits less. A CPU would have to do all
of it itself, and answers at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

from typing_extensions import Buffer

from homing.engine.engine import Engine
from homing.engine.session import EngineSession
from homing.errors import HomingError, WireError
from homing.transport import Dealer
from homing.wire import Goodbye, Message, pack, parse
from homing.wire.messages import ToEngine

log = logging.getLogger(__name__)

LINGER_S = 1.0


class Worker:
    def __init__(self, engine: Engine, session: EngineSession, dealer: Dealer) -> None:
        self._engine = engine
        self._engine.wake = dealer.wake
        self._session = session
        self._dealer = dealer
        self._leave_in_s: float | None = None
        self._held: deque[ToEngine] = deque()  # came during a step, and waits for its end

    def leave(self, timeout_s: float) -> None:
        """Take no more requests, finish those that are there for so long, and end. For a signal
        handler: it only takes note."""
        self._leave_in_s = timeout_s
        self._dealer.wake()

    def run(self) -> None:
        """Serve until an exception, such as SystemExit from a signal, ends it, and say Goodbye.

        A step that fails ends the process: what the model or the cache holds is no longer known. A
        supervisor starts another, and clients submit their requests again.
        """
        failed = False
        try:
            self._send(self._session.start(time.monotonic()))
            while True:
                self._turn()
        except HomingError:
            raise
        except Exception:
            log.exception("the engine failed")
            failed = True
            raise SystemExit(1) from None
        finally:
            self._send([Goodbye(failed)])
            self._dealer.close(linger_s=LINGER_S)

    def _turn(self) -> None:
        while self._held:
            self._handle(self._held.popleft())
        for frames in self._dealer.receive(self._idle_s()):
            if message := _parsed(frames):
                self._handle(message)
        if self._dealer.lost_connection:
            self._dealer.lost_connection = False
            self._send(self._session.lost_connection(time.monotonic()))
        now = time.monotonic()
        if self._leave_in_s is not None:
            self._send(self._session.leave(now, self._leave_in_s))
            self._leave_in_s = None
        self._send(self._session.tick(now))
        self._engine.expire(now)
        if self._engine.has_work:
            self._step()
        self._send(self._session.poll())
        if self._session.is_stopping or self._session.may_go(time.monotonic()):
            raise SystemExit(0)

    def _step(self) -> None:
        if not self._engine.runner.overlaps:
            self._send(self._session.outputs(self._engine.step()))
            return
        step = self._engine.begin_step()
        self._send(self._session.outputs(self._engine.take_outputs()))  # of the step before
        if step is not None:
            self._receive_beside()
            self._engine.prepare_next(step)
        self._engine.end_step(step)

    def _receive_beside(self) -> None:
        """Take on new requests while a step runs. Whatever else comes changes what the step works
        on: it waits, and so does all that comes after it, for its end."""
        for frames in self._dealer.receive(0.0):
            message = _parsed(frames)
            if message is None:
                continue
            if self._held or not self._session.may_join_a_step(message):
                self._held.append(message)
            else:
                self._handle(message)

    def _idle_s(self) -> float:
        """How long there is nothing to do unless a message comes."""
        if self._engine.has_work:
            return 0.0
        return max(0.0, self._session.next_tick - time.monotonic())

    def _handle(self, message: ToEngine) -> None:
        self._send(self._session.handle(message, time.monotonic()))

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._dealer.send(pack(message))


def _parsed(frames: list[Buffer]) -> ToEngine | None:
    """None, and a line in the log, for what is not for an engine."""
    try:
        message = parse(frames)
        if not isinstance(message, ToEngine):
            raise WireError(f"{type(message).__name__} is not for an engine")
    except WireError as error:
        log.warning("dropped a message from the coordinator: %s", error)
        return None
    return message
