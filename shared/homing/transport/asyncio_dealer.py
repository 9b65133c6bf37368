"""AsyncDealer: the client's end, driven by an asyncio loop through the socket's file descriptor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
from typing_extensions import Buffer

from homing.transport import frames as frames_
from homing.transport.connections import Connections
from homing.transport.keys import Keys, connect_with

log = logging.getLogger(__name__)


class AsyncDealer:
    """A connected DEALER socket that calls `on_message` for each message, on the running loop.

    libzmq's descriptor is edge triggered: it signals once, and any call on the socket may swallow
    the signal. So each turn drains a burst and, when more may be there, asks for another turn.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        on_message: Callable[[list[Buffer]], None],
        on_lost_connection: Callable[[], None],
        keys: Keys | None = None,
    ) -> None:
        """on_lost_connection: the connection broke, and what was on its way was lost with it."""
        self._on_message = on_message
        self._on_lost_connection = on_lost_connection
        self._loop = asyncio.get_running_loop()
        self._turn_due = False
        self._socket = frames_.new_socket(zmq.DEALER, send_queue=0, receive_queue=0)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        if keys:
            connect_with(self._socket, keys)
        self._connections = Connections(self._socket)
        self._connections.connect(address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._monitor_fd = self._connections.fileno()
        self._loop.add_reader(self._monitor_fd, self._look_at_connections)
        self._connections.broke()  # the descriptor signals only to who found nothing before
        self._ask_for_turn()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message; never blocks, also while the coordinator is away. Where it does not let
        this process in the message is dropped: whoever sent it ends by its own patience."""
        frames_.send_or_drop(self._socket, frames)
        self._ask_for_turn()

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close, waiting up to `linger_s` in the background for what is unsent. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._monitor_fd)
            self._connections.close()
            self._socket.close(linger=round(linger_s * 1000))

    def _look_at_connections(self) -> None:
        if not self._socket.closed and self._connections.broke():
            self._on_lost_connection()

    def _ask_for_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._socket.closed:
            return
        for frames in frames_.drain(self._socket):
            self._on_message(frames)
            if self._socket.closed:
                return
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._ask_for_turn()
