"""Connection: tells when a DEALER's connection broke, which libzmq itself makes good in silence.

What was on its way when a connection broke is gone, in both directions, and neither side knows:
whoever hears of it must begin a new session. A connection also counts as broken when the other
side's libzmq answers no ping for a while: its machine, or the network, went away without a word.
"""

from __future__ import annotations

from itertools import count

import zmq

from homing.errors import ConfigError

# Not the socket's id(): libzmq may still hold the address of a closed one that had the same.
_monitors = count()


class Connection:
    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Connect `socket`. Raises `ConfigError` for what is no address, and closes it then."""
        self._socket = socket
        self.monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED, f"inproc://monitor-{next(_monitors)}"
        )
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            socket.close()
            raise ConfigError(f"cannot connect to {address}: {error.strerror or error}") from error

    def broke(self) -> bool:
        """Whether it broke since the last call. Never waits."""
        broke = False
        try:
            while True:
                self.monitor.recv_multipart(zmq.NOBLOCK)
                broke = True
        except zmq.Again:
            return broke

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)
