"""Connection: tells when a DEALER's connection broke, which libzmq itself makes good in silence.

What was on its way when a connection broke is gone, in both directions, and neither side knows:
whoever hears of it must begin a new session. A connection also counts as broken when the other
side's libzmq answers no ping for a while: its machine, or the network, went away without a word.
"""

from __future__ import annotations

import zmq


class Connection:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Call it before `socket` connects."""
        self._socket = socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://{id(socket)}")

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
