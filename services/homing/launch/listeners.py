"""The HTTP port: known to be free, then shared by one listening socket for each frontend.

SO_REUSEPORT spreads new connections over several sockets on one port, but it also lets a second
server bind the port of the first without an error, and take half of its clients. So the first
socket binds without it, which fails if anyone listens there, and only then is marked as shared:
the port is never free in between, and a second launch fails at its own first bind.
"""

from __future__ import annotations

import socket
from typing import Any

from homing.errors import ConfigError

BACKLOG = 1024


# Host and port first; IPv6 adds two numbers.
Address = tuple[Any, ...]


def open_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that listen on one port; 0 lets the system choose it.

    A connection waits in its socket's backlog, not refused, while that socket's frontend restarts.
    """
    family, address = _resolve(host, port)
    listeners: list[socket.socket] = []
    try:
        listeners.append(_bind(family, address, exclusive=True))
        listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound = listeners[0].getsockname()
        for _ in range(count - 1):
            listeners.append(_bind(family, bound, exclusive=False))
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listeners


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from error
    family, _, _, _, address = found[0]
    return family, address


def _bind(family: socket.AddressFamily, address: Address, *, exclusive: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier server that still wait for their end do not hold the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not exclusive:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
