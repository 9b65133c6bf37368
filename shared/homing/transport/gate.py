"""Gate: lets in whom the coordinator's keys name, and says of each message whose key brought it.

libzmq asks it, by ZAP (rfc.zeromq.org/spec/27), about each connection. What it answers comes back
with every message of that connection: the role of the key.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85

from homing.transport.keys import Keys

log = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"homing"


class Gate:
    """Belongs to a ROUTER socket in a context of its own: libzmq asks one gate a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        """Call it before the socket is made."""
        self._keys = keys
        self._role_of_key = {z85.decode(key): role for role, key in keys.others.items()}
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Call it before `socket` binds."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def _run(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart()
            except zmq.ContextTerminated:
                self._socket.close(0)
                return
            self._socket.send_multipart(self._answer(request))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, mechanism, *credentials = request
        role = self._role_of_key.get(credentials[0]) if mechanism == b"CURVE" else None
        if role is None:
            log.warning("refused an unknown key", extra={"address": address.decode()})
            return [version, request_id, b"400", b"unknown key", b"", b""]
        return [version, request_id, b"200", b"OK", role.encode(), b""]


def comes_from_its_role(identity: bytes, frame: zmq.Frame) -> bool:
    """Whether the sender of a message, of which `frame` is a part, calls itself what its key says
    that it is."""
    role: Any = frame.get("User-Id")
    return identity[:1] == role[:1].encode()
