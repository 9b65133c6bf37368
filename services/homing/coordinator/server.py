"""The coordinator's loop: bytes to events, instructions to sends. The only I/O it does.

One ROUTER socket for everybody. A burst is read whole, then handled, then answered: the same code
runs again and again while it is in the processor's caches, which halves the cost of a message under
load. A send never waits: what cannot be sent comes back to `state` as an event, which ends that
peer's session.
"""

from __future__ import annotations

import logging
import secrets
import time

from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.events import Failure, Forward, Instruction, Tick, Unsent, read_event
from homing.coordinator.recording import Recorder
from homing.coordinator.state import Coordinator
from homing.transport import MAX_BURST, Router, SendResult, read_keys
from homing.wire import Heartbeat, pack

log = logging.getLogger(__name__)


class Server:
    def __init__(self, config: CoordinatorConfig) -> None:
        """Binds. Raises `ConfigError` when the address is taken."""
        keys = read_keys(config.keys, "coordinator") if config.keys else None
        self._router = Router(
            config.bind, send_queue=config.send_queue, keys=keys, cache_dir=config.cache_dir
        )
        self._tick_s = config.heartbeat_s
        self._gone: dict[bytes, Unsent] = {}  # peer -> that a message did not reach it
        now = time.monotonic()
        self._recorder = Recorder(config.record, config.routing, now=now) if config.record else None
        record = self._recorder.record if self._recorder else None
        incarnation = secrets.randbits(63)
        self._state = Coordinator(config, incarnation=incarnation, now=now, record=record)
        self._sign_of_life = pack(Heartbeat(incarnation))
        self.address = self._router.address
        log.info("bound", extra={"address": self.address, "policy": config.policy})

    def run(self) -> None:
        """Serve until an exception, such as SystemExit from a signal, ends it."""
        receive, handle, perform = self._router.receive, self._state.handle, self._perform
        next_tick = now = time.monotonic()
        while True:
            gone, self._gone = self._gone, {}
            wait_s = 0.0 if gone else max(0.0, next_tick - now)
            events = [read_event(sender, frames) for sender, frames in receive(wait_s)]
            now = time.monotonic()
            perform(self._state.handle_all(events, now))
            if gone and len(events) == MAX_BURST and now < next_tick:
                self._gone = gone | self._gone
                continue  # there is more to read
            for peer, unsent in gone.items():
                # It may be back: then it says Hello, or has said it.
                if self._router.send(peer, self._sign_of_life) is not SendResult.SENT:
                    perform(handle(unsent, now))
            if now >= next_tick:
                perform(handle(Tick(), now))
                next_tick = now + self._tick_s

    def close(self) -> None:
        self._router.close()
        if self._recorder:
            self._recorder.close()

    def _perform(self, instructions: list[Instruction]) -> None:
        """Send; a peer that does not read is lost, which may ask for more sends.

        It ends: each failure, but a stranger's, takes a peer away. One that is not connected is
        lost after what it sent before, perhaps a Goodbye, has been read.
        """
        while instructions:
            messages = [
                (each.peer, each.frames if isinstance(each, Forward) else pack(each.message))
                for each in instructions
            ]
            instructions = []
            for peer, result in self._router.send_all(messages):
                if result is SendResult.GONE:
                    self._gone[peer] = Unsent(peer, Failure.GONE)
                else:
                    unsent = Unsent(peer, Failure.FULL)
                    instructions += self._state.handle(unsent, time.monotonic())
