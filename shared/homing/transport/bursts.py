"""Bursts: many messages of a ROUTER in one call, received and sent in C.

pyzmq takes a call and an object for each frame, and a message has five. In C a message costs a
quarter of that. Where there is no compiler, or pyzmq is not built upon a libzmq that can be found,
`load_bursts` says None, and messages go one by one.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path

import zmq
from typing_extensions import Buffer

from homing.native import NoCompiler, built_library
from homing.transport.frames import MAX_BURST

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "bursts.c"
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC")
NOT_OURS = -1
_OF_LIBZMQ = (
    *("zmq_msg_init", "zmq_msg_recv", "zmq_msg_data", "zmq_msg_size", "zmq_msg_more"),
    *("zmq_msg_close", "zmq_send"),
)

Addressed = tuple[bytes, Sequence[Buffer]]
"""The identity of a message's peer, and its frames."""


def load_bursts(socket: zmq.Socket[bytes], cache_dir: Path) -> Bursts | None:
    """`cache_dir`: where compiled code is kept."""
    try:
        return Bursts(socket, cache_dir)
    except (NoCompiler, ImportError, AttributeError, OSError) as error:
        log.info("messages are received and sent one by one: %s", error)
        return None


class Bursts:
    """Belongs to a socket, and to its thread."""

    def __init__(self, socket: zmq.Socket[bytes], cache_dir: Path) -> None:
        """Raises NoCompiler, `ImportError`, `AttributeError` or `OSError`."""
        if zmq.zmq_version_info()[0] != 4:
            raise NoCompiler(f"libzmq is {zmq.zmq_version()}, not 4")
        # What pyzmq is linked with is looked up through pyzmq itself: there may be others about.
        backend = importlib.import_module("zmq.backend.cython._zmq")
        libzmq = ctypes.CDLL(backend.__file__)
        functions = [ctypes.cast(getattr(libzmq, name), ctypes.c_void_p) for name in _OF_LIBZMQ]
        self._zmq = (ctypes.c_void_p * len(functions))(*functions)
        library = ctypes.PyDLL(str(built_library(SOURCE, cache_dir, FLAGS)))
        self._receive = library.receive_burst
        self._receive.restype = ctypes.py_object
        self._receive.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
        ]
        self._send = library.send_burst
        self._send.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p),
        ]
        self._socket = socket.underlying
        self._error = ctypes.c_int()
        self._error_at = ctypes.byref(self._error)

    def receive(self) -> list[tuple[bytes, list[Buffer]]]:
        """The messages that are there, `MAX_BURST` at most. Raises `zmq.ZMQError`."""
        burst = self._receive(self._zmq, self._socket, MAX_BURST, self._error_at)
        if self._error.value not in (0, zmq.EAGAIN):
            raise zmq.ZMQError(self._error.value)
        return burst

    def send(self, messages: list[Addressed], at: int) -> tuple[int, int]:
        """Send them from the one at `at` on, up to one that cannot be sent.

        Returns its place, and the errno, or NOT_OURS where it has to be sent by itself.
        """
        at = self._send(self._zmq, self._socket, messages, at, self._error_at)
        return at, self._error.value
