"""Hypercorn, set up for long answers: long-lived connections and a bounded stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from hypercorn.asyncio import serve
from hypercorn.config import Config
from quart import Quart

from homing.errors import ConfigError
from homing.frontend.keep_alive import use_connection_servers

KEEP_ALIVE_S = 120.0
"""Idle connections live longer than in client pools (75 s at most), so that none is reset just as a
client takes it up again."""
BACKLOG = 1024
LAST_WORDS_S = 1.0
"""For sending the errors that end requests at a stop."""


class TlsFiles(NamedTuple):
    """Paths of PEM files."""

    certificate: str
    key: str


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` if the address is taken or not ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error


async def serve_http(
    app: Quart,
    fd: int,
    *,
    stop: asyncio.Event,
    drain_s: float,
    end_requests: Callable[[], Awaitable[None]],
    tls: TlsFiles | None = None,
) -> None:
    """Serve on the listening socket `fd`, which it takes over, until `stop`.

    Then accepts nothing new and gives running requests `drain_s`. `end_requests` makes those that
    are left fail, so that their clients are told.
    """
    use_connection_servers()
    config = _hypercorn_config(fd, drain_s, tls)
    serving = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await asyncio.wait([serving], timeout=drain_s)
    await end_requests()
    # From Python 3.12 on, Hypercorn waits for open connections before it looks at its own limit.
    await asyncio.wait([serving], timeout=2 * LAST_WORDS_S)
    was_cut_off = serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    if not was_cut_off and (error := serving.exception()):
        raise error


def _hypercorn_config(fd: int, drain_s: float, tls: TlsFiles | None) -> Config:
    """Raises `ConfigError` if the files of `tls` do not work."""
    config = Config()
    config.bind = [f"fd://{fd}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    config.graceful_timeout = drain_s + LAST_WORDS_S
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    if tls is not None:
        config.certfile, config.keyfile = tls
        config.alpn_protocols = ["http/1.1"]
        try:
            config.create_ssl_context()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"the certificate or its key cannot be used: {error}") from error
    return config
