"""The coordinator's loop: bytes to events, instructions to sends. The only I/O it does.

One ROUTER socket for everybody. A burst is drained before the clock is looked at; a send never
waits: what cannot be sent comes back to `state` as an event, which ends that peer's session.
"""

from __future__ import annotations

import logging
import secrets
import time

from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.events import Failure, Forward, Instruction, Tick, Unsent, read_event
from homing.coordinator.recording import Recorder
from homing.coordinator.state import Coordinator
from homing.transport import Router, SendResult, read_keys
from homing.wire import pack

log = logging.getLogger(__name__)

_FAILURE = {SendResult.GONE: Failure.GONE, SendResult.FULL: Failure.FULL}


class Server:
    def __init__(self, config: CoordinatorConfig) -> None:
        """Binds. Raises `ConfigError` when the address is taken."""
        keys = read_keys(config.keys, "coordinator") if config.keys else None
        self._router = Router(config.bind, send_queue=config.send_queue, keys=keys)
        self._tick_s = config.heartbeat_s
        now = time.monotonic()
        self._recorder = Recorder(config.record, config.routing, now=now) if config.record else None
        record = self._recorder.record if self._recorder else None
        incarnation = secrets.randbits(63)
        self._state = Coordinator(config, incarnation=incarnation, now=now, record=record)
        self.address = self._router.address
        log.info("bound", extra={"address": self.address, "policy": config.policy})

    def run(self) -> None:
        """Serve until an exception, such as SystemExit from a signal, ends it."""
        receive, handle, perform = self._router.receive, self._state.handle, self._perform
        next_tick = now = time.monotonic()
        while True:
            for sender, frames in receive(max(0.0, next_tick - now)):
                perform(handle(read_event(sender, frames), time.monotonic()))
            now = time.monotonic()
            if now >= next_tick:
                perform(handle(Tick(), now))
                next_tick = now + self._tick_s

    def close(self) -> None:
        self._router.close()
        if self._recorder:
            self._recorder.close()

    def _perform(self, instructions: list[Instruction]) -> None:
        """Send; a peer that cannot be sent to is lost, which may ask for more sends.

        It ends: each failure, but a stranger's, takes a peer away.
        """
        for instruction in instructions:
            is_forward = isinstance(instruction, Forward)
            frames = instruction.frames if is_forward else pack(instruction.message)
            result = self._router.send(instruction.peer, frames)
            if result is not SendResult.SENT:
                unsent = Unsent(instruction.peer, _FAILURE[result])
                instructions += self._state.handle(unsent, time.monotonic())
