"""The engine process's loop: receive, handle, schedule, run, send.

One thread, which waits for nothing but its socket.
"""

from __future__ import annotations

import logging
import time
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
        for frames in self._dealer.receive(self._idle_s()):
            self._receive(frames)
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
            self._send(self._session.outputs(self._engine.step()))
        self._send(self._session.poll())
        if self._session.is_stopping or self._session.may_go(time.monotonic()):
            raise SystemExit(0)

    def _idle_s(self) -> float:
        """How long there is nothing to do unless a message comes."""
        if self._engine.has_work:
            return 0.0
        return max(0.0, self._session.next_tick - time.monotonic())

    def _receive(self, frames: list[Buffer]) -> None:
        try:
            message = parse(frames)
            if not isinstance(message, ToEngine):
                raise WireError(f"{type(message).__name__} is not for an engine")
        except WireError as error:
            log.warning("dropped a message from the coordinator: %s", error)
            return
        self._send(self._session.handle(message, time.monotonic()))

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._dealer.send(pack(message))
