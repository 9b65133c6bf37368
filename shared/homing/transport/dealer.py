"""Dealer: the engine's end, for a loop that is not asyncio."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from socket import socketpair

import zmq
from typing_extensions import Buffer

from homing.transport import frames as frames_
from homing.transport.connections import Connections
from homing.transport.keys import Keys, connect_with

log = logging.getLogger(__name__)


class Dealer:
    """A connected DEALER socket. Start order does not matter: libzmq goes on trying to connect."""

    lost_connection = False
    """The connection broke, and with it was lost what was on its way. For the owner to clear."""

    def __init__(self, address: str, identity: bytes, keys: Keys | None = None) -> None:
        # No bound on the send queue: what waits in it is bounded by the work that was accepted.
        self._socket = frames_.new_socket(zmq.DEALER, send_queue=0, receive_queue=0)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        if keys:
            connect_with(self._socket, keys)
        self._connections = Connections(self._socket)
        self._connections.connect(address)
        self._wakened, self._waker = socketpair()
        self._waker.setblocking(False)
        self._connections.poll_also(self._wakened)

    def receive(self, timeout_s: float) -> Iterator[list[Buffer]]:
        """Wait up to `timeout_s` (0: not at all) for a message or `wake`, then yield a burst."""
        if timeout_s and self._wakened.fileno() in self._connections.poll(timeout_s):
            self._wakened.recv(4096)
        self.lost_connection |= self._connections.broke()
        yield from frames_.drain(self._socket)

    def wake(self) -> None:
        """End a `receive` that waits. The one method for other threads."""
        with suppress(OSError):  # full, so it will wake; or closed
            self._waker.send(b"\0")

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message; never blocks, also while the coordinator is away. Where it does not let
        this process in the message is dropped: whoever sent it ends by its own patience."""
        frames_.send_or_drop(self._socket, frames)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close, waiting up to `linger_s` in the background for what is unsent."""
        self._connections.close()
        self._socket.close(linger=round(linger_s * 1000))
        self._wakened.close()
        self._waker.close()
