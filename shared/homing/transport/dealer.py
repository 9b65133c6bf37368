"""Dealer: the engine's end, for a loop that is not asyncio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq
from typing_extensions import Buffer

from homing.transport import frames as frames_


class Dealer:
    """A connected DEALER socket. Start order does not matter: libzmq goes on trying to connect."""

    def __init__(self, address: str, identity: bytes) -> None:
        # No bound on the send queue: what waits in it is bounded by the work that was accepted.
        self._socket = frames_.new_socket(zmq.DEALER, send_queue=0, receive_queue=0)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)

    def receive(self, timeout_s: float) -> Iterator[list[Buffer]]:
        """Wait up to `timeout_s` (0: not at all) for a message, then yield a burst."""
        if not timeout_s or self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            yield from frames_.drain(self._socket)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message; never blocks, also while the coordinator is away."""
        frames_.send(self._socket, frames)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close, waiting up to `linger_s` in the background for what is unsent."""
        self._socket.close(linger=round(linger_s * 1000))
