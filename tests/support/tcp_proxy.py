"""A network between two processes, which a test can break: one TCP proxy on its own thread."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from typing import Any, Self


class TcpProxy:
    """Forwards connections to `target` ("tcp://HOST:PORT"). `address` is its own."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._other: dict[socket.socket, socket.socket] = {}
        self._frozen: list[socket.socket] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """What is connected stays so and hears nothing any more, as if a cable were pulled."""
        with self._lock:
            for end in self._other:
                self._selector.unregister(end)
            self._frozen += self._other
            self._other = {}

    def cut(self) -> None:
        """Reset every connection, with what is on its way."""
        with self._lock:
            for end in list(self._other):
                self._drop(end, reset=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped = True
        self._thread.join()
        self.cut()
        for end in self._frozen:
            end.close()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    self._serve(key.fileobj)

    def _serve(self, end: Any) -> None:
        if end is self._listener:
            near, _ = self._listener.accept()
            self._connect(near)
        elif end in self._other:
            try:
                data = end.recv(65536)
                self._other[end].sendall(data)
            except OSError:
                data = b""
            if not data:
                self._drop(end)

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        self._other |= {near: far, far: near}
        for end in (near, far):
            self._selector.register(end, selectors.EVENT_READ)

    def _drop(self, end: socket.socket, *, reset: bool = False) -> None:
        """Close a connection's two ends; a reset takes what is on its way with it."""
        if end not in self._other:
            return
        for each in (end, self._other[end]):
            del self._other[each]
            self._selector.unregister(each)
            if reset:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
