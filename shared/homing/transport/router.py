"""Router: the coordinator's end. One bound socket, every peer behind its identity."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import zmq
from typing_extensions import Buffer

from homing.errors import ConfigError
from homing.transport import frames as frames_
from homing.transport.bursts import NOT_OURS, Addressed, load_bursts
from homing.transport.connections import Connections
from homing.transport.gate import Gate, comes_from_its_role
from homing.transport.keys import Keys


class SendResult(Enum):
    """What became of a message."""

    SENT = "sent"  # in the peer's queue
    GONE = "gone"  # no peer of this identity is connected
    FULL = "full"  # the peer does not read, and its queue is full


class Router:
    """A bound ROUTER socket that never blocks on a peer."""

    def __init__(
        self,
        address: str,
        *,
        send_queue: int,
        keys: Keys | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Bind `address`; `tcp://HOST:0` takes a free port. Raises `ConfigError` when it cannot be
        bound.

        send_queue: bounds the messages that wait for one peer.
        keys: nobody else is let in.
        cache_dir: where compiled code is kept; None: none is used.
        """
        self._own_context = zmq.Context() if keys else None
        gate = Gate(self._own_context, keys) if self._own_context and keys else None
        self._admits = comes_from_its_role if gate else None
        self._socket = frames_.new_socket(
            zmq.ROUTER, send_queue=send_queue, receive_queue=send_queue, context=self._own_context
        )
        if gate:
            gate.guard(self._socket)
        # Without MANDATORY a message to a peer that left vanishes without a word. With HANDOVER a
        # peer whose connection broke gets its identity back at once, not when the old one times
        # out.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._connections = Connections(self._socket, breaks=False)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind {address}: {error.strerror or error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        # Whose key a message came with is asked of its frames, which are pyzmq's.
        self._bursts = load_bursts(self._socket, cache_dir) if cache_dir and not keys else None

    def receive(self, timeout_s: float) -> list[tuple[bytes, list[Buffer]]]:
        """Wait up to `timeout_s` for a message. A burst of (sender identity, frames)."""
        burst: list[tuple[bytes, list[Buffer]]] = []
        if not self._connections.poll(timeout_s):
            return burst
        if self._bursts:
            return self._bursts.receive()
        receive, admits = self._socket.recv, self._admits
        for _ in range(frames_.MAX_BURST):
            try:
                identity = receive(frames_.NOBLOCK)  # copied: what follows it needs no asking
            except zmq.Again:
                break
            first = receive(0, False)
            frames = frames_.rest_of_message(receive, first)
            if admits is None or admits(identity, first):
                burst.append((identity, frames))
        return burst

    def send_all(self, messages: Sequence[Addressed]) -> list[tuple[bytes, SendResult]]:
        """Queue messages, one after the other; never blocks. Returns whom one did not reach."""
        failed: list[tuple[bytes, SendResult]] = []
        all_, at, error = list(messages), 0, NOT_OURS
        while at < len(all_):
            if self._bursts:
                at, error = self._bursts.send(all_, at)
                if not error:
                    break
            peer, frames = all_[at]
            result = self.send(peer, frames) if error == NOT_OURS else _result_of(error)
            if result is not SendResult.SENT:
                failed.append((peer, result))
            at += 1
        return failed

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> SendResult:
        """Queue a message for a peer; never blocks."""
        try:
            frames_.send(self._socket, frames, to=identity)
        except zmq.ZMQError as error:
            return _result_of(error.errno)
        return SendResult.SENT

    def close(self) -> None:
        self._connections.close()
        self._socket.close()
        if self._own_context:
            self._own_context.term()


def _result_of(error: int | None) -> SendResult:
    """Raises `zmq.ZMQError` for what is no peer's doing."""
    if error == zmq.EAGAIN:
        return SendResult.FULL
    if error == zmq.EHOSTUNREACH:
        return SendResult.GONE
    raise zmq.ZMQError(error)
