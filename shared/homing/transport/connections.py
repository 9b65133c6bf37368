"""Connections: what libzmq tells of a socket's connections, which it makes and mends in silence.

What was on its way when a connection broke is gone, in both directions, and neither side knows:
whoever hears of it must begin a new session. A connection also counts as broken when the other
side's libzmq answers no ping for a while: its machine, or the network, went away without a word.

New ones over IPC get wider buffers. A prompt of 131,072 tokens is half a megabyte, and Linux gives
a Unix socket a send buffer of 200 kB: sender and receiver wake each other several times for each
such message. libzmq's own option for it reaches TCP alone, whose buffers grow by themselves.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from contextlib import suppress
from itertools import count
from struct import Struct
from typing import Any, cast

import zmq

from homing.errors import ConfigError

SEND_BUFFER_BYTES = 2**20
"""The kernel doubles it, for its own books, and goes no further than net.core.wmem_max."""

# zmq_socket_monitor's: what happened, and the descriptor it happened to. pyzmq's own reader of it
# takes asyncio with it.
_EVENT = Struct("=Hi")

# Not the socket's id(): libzmq may still hold the address of a closed one that had the same.
_numbers = count()


class Connections:
    def __init__(self, socket: zmq.Socket[bytes], *, breaks: bool = True) -> None:
        """Call it before `socket` is connected or bound. Without `breaks` nothing is told of
        broken ones."""
        self._socket = socket
        self._broke = False
        events = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
        if breaks:
            events |= zmq.EVENT_DISCONNECTED
        address = f"inproc://monitor-{next(_numbers)}"
        socket.monitor(address, events)
        context: Any = cast(Any, socket).context  # its type would be of unknown sockets
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # No bound: libzmq waits where it can't tell of a connection, and serves nobody meanwhile.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def connect(self, address: str) -> None:
        """Raises `ConfigError` for what is no address, and closes the socket then."""
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            self._socket.close()
            raise ConfigError(f"cannot connect to {address}: {error.strerror or error}") from error

    def fileno(self) -> int:
        """Readable when something happened; edge triggered, so call `broke` first."""
        return int(self._monitor.getsockopt(zmq.FD))

    def poll_also(self, other: sockets.socket) -> None:
        """Let `poll` end when this is readable, too, and return its descriptor."""
        self._poller.register(other, zmq.POLLIN)

    def poll(self, timeout_s: float) -> set[object]:
        """Wait until the socket is readable, or a connection broke; returns what is readable."""
        until = time.monotonic() + timeout_s
        while True:
            timeout_ms = max(0, round(1000 * (until - time.monotonic())))
            ready = {each for each, _ in self._poller.poll(timeout_ms)}
            if self._monitor not in ready:
                return ready
            self._look()
            ready.remove(self._monitor)
            if ready or self._broke or not timeout_ms:
                return ready

    def broke(self) -> bool:
        """Whether one broke since the last call. Never waits."""
        self._look()
        broke, self._broke = self._broke, False
        return broke

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _look(self) -> None:
        with suppress(zmq.Again):
            while True:
                head, endpoint = self._monitor.recv_multipart(zmq.NOBLOCK)
                event, descriptor = _EVENT.unpack(head)
                if event == zmq.EVENT_DISCONNECTED:
                    self._broke = True
                elif endpoint.startswith(b"ipc:"):
                    _widen(descriptor)


def _widen(descriptor: int) -> None:
    """The connection may be closed again, and the number another's."""
    with suppress(OSError):
        own = os.dup(descriptor)
        try:
            connection = sockets.socket(fileno=own)
        except OSError:  # no socket
            os.close(own)
            return
        with connection:
            if connection.family == sockets.AF_UNIX:
                connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, SEND_BUFFER_BYTES)
