"""Receiving and sending multipart messages without needless copies.

Small frames become `bytes`: cheaper than holding a zmq frame object for each. Frames of
`ZERO_COPY_BYTES` and more stay in libzmq's buffer, and are sent on from there by reference.
Python's own memory is copied, however long: to lend it to libzmq's thread takes a thread of pyzmq's
that takes it back, and a process that ends meanwhile may abort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, cast

import zmq
import zmq.backend
from typing_extensions import Buffer

log = logging.getLogger(__name__)

ZERO_COPY_BYTES = 65536
"""pyzmq's own default threshold; below it a copy is cheaper than the bookkeeping."""

MAX_BURST = 256
"""Messages drained before the caller gets a turn to look at its clock."""

MAX_FRAME_BYTES = 64 * 2**20
"""A peer that sends a larger frame is disconnected by libzmq: nothing we send comes near."""

PING_MS = 2_000
PING_TIMEOUT_MS = 10_000
"""A connection over which nothing came for so long after a ping is broken."""


class Receive(Protocol):
    """A socket's `recv`, of frames that are not copied yet."""

    def __call__(self, flags: int, copy: Literal[False]) -> zmq.Frame: ...


# Plain ints, and a loop of our own in `send`: send_multipart would combine zmq's flag enums anew
# for each frame, which costs three times what the sending does.
# For the same reason the wrapper that pyzmq has around the sending is gone around: another half.
_send = cast("Callable[[zmq.Socket[bytes], Any, int, bool], None]", zmq.backend.Socket.send)
NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def drain(socket: zmq.Socket[bytes]) -> Iterator[list[Buffer]]:
    """Messages that are there now, `MAX_BURST` at most; never waits."""
    receive = socket.recv
    for _ in range(MAX_BURST):
        try:
            first = receive(NOBLOCK, False)
        except zmq.Again:
            return
        yield rest_of_message(receive, first)


def rest_of_message(receive: Receive, frame: zmq.Frame) -> list[Buffer]:
    """The frames of the message of which this one has been received, it included.

    A third cheaper than recv_multipart, which asks the socket each time whether there are more.
    """
    frames: list[Any] = [frame.bytes if len(frame) < ZERO_COPY_BYTES else frame]
    while frame.more:
        frame = receive(0, False)
        frames.append(frame.bytes if len(frame) < ZERO_COPY_BYTES else frame)
    return frames


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer], to: bytes | None = None) -> None:
    """Hand the frames to libzmq, those of a ROUTER with the identity that they are for. Raises
    `zmq.ZMQError` (EAGAIN, EHOSTUNREACH) instead of waiting."""
    if to is not None:
        _send(socket, to, _MORE, True)
    *head, last = frames
    for frame in head:
        _send(socket, frame, _MORE, not isinstance(frame, zmq.Frame))
    _send(socket, last, NOBLOCK, not isinstance(last, zmq.Frame))


def send_or_drop(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Of a DEALER. Its queue has no bound: it takes nothing only where the other end refused its
    key."""
    try:
        send(socket, frames)
    except zmq.Again:
        log.debug("not sent: the coordinator does not let this process in")


def new_socket(
    kind: int,
    *,
    send_queue: int,
    receive_queue: int,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> zmq.Socket[bytes]:
    """A socket that drops its unsent messages on close and bounds its queues; 0 is no bound."""
    socket: zmq.Socket[bytes] = zmq.Socket(context or zmq.Context.instance(), kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, send_queue)
    socket.setsockopt(zmq.RCVHWM, receive_queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
    return socket
