"""The life of one launch: take the port, start the processes, say when they serve, stop them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from homing.errors import ConfigError
from homing.launch.commands import coordinator_command, engine_commands, frontend_commands
from homing.launch.config import LaunchConfig
from homing.launch.family import Family
from homing.launch.listeners import open_listeners
from homing.launch.readiness import Fleet, wait_until_ready
from homing.observe import configure_logging

logger = logging.getLogger(__name__)

# The longest path of a Unix socket on any system we know (macOS), less its last NUL.
MAX_SOCKET_PATH = 103
# Where to ask a server that listens on every address.
LOOPBACK_OF_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(config: LaunchConfig) -> int:
    """Serve until a signal asks to stop; 0 after a clean stop. Raises ConfigError before."""
    configure_logging("launch", verbose=config.verbose)
    check_model(config.model)
    with contextlib.ExitStack() as stack:
        listeners = open_listeners(config.host, config.port, config.frontend_replicas)
        for listener in listeners:
            stack.enter_context(listener)
        address = config.coordinator_bind or stack.enter_context(private_address())
        lifeline_fd = stack.enter_context(lifeline())
        family = Family(
            stop_order=[
                frontend_commands(config, address, listeners, lifeline_fd),
                engine_commands(config, address, lifeline_fd),
                [coordinator_command(config, address, lifeline_fd)],
            ]
        )
        asyncio.run(supervise(family, lambda stop: announce(config, family, listeners[0])))
    return 0


async def supervise(family: Family, beside: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Keep the family running until a signal asks to stop, or `beside` does by its event; then stop
    it. An error of either ends it, too."""
    stop_asked = asyncio.Event()
    _handle_signals(family, stop_asked)
    tasks: set[asyncio.Future[Any]] = {
        asyncio.create_task(family.keep_running()),
        asyncio.ensure_future(beside(stop_asked)),
        asyncio.create_task(stop_asked.wait()),
    }
    try:
        while not stop_asked.is_set():
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # an error ends the launch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await family.stop()


async def announce(config: LaunchConfig, family: Family, listener: socket.socket) -> None:
    """The one line on stdout, when every frontend and every rank serves."""
    address, port = listener.getsockname()[:2]
    fleet = Fleet(
        host=LOOPBACK_OF_ANY.get(address) or address,
        port=port,
        num_frontends=config.frontend_replicas,
        num_ranks=config.data_parallel_size,
        tls=config.certfile is not None,
    )
    model = await wait_until_ready(fleet, timeout_s=config.start_timeout_s)
    family.mark_ready()
    host = f"[{config.host}]" if ":" in config.host else config.host
    ranks = f"{config.data_parallel_size} engine ranks"
    scheme = "https" if config.certfile else "http"
    print(f"Homing is ready: {scheme}://{host}:{port} ({model}, {ranks})", flush=True)


def _handle_signals(family: Family, stop_asked: asyncio.Event) -> None:
    """The first signal asks for a clean stop, the next kills what is left."""

    def on_signal() -> None:
        if stop_asked.is_set():
            logger.warning("stopping at once")
            family.kill()
        else:
            logger.info("stopping: once more to stop at once")
            stop_asked.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is ignored under nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """Address of the coordinator: a Unix socket in a directory that only this user may enter."""
    with tempfile.TemporaryDirectory(prefix="homing-") as directory:
        path = Path(directory, "coordinator.sock")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigError(f"the path of a socket is too long: {path}: set TMPDIR to a shorter")
        yield f"ipc://{path}"


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """The end of a pipe for children to read: it ends when this process does, however it does."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(write_fd)
        os.close(read_fd)


def check_model(model: str | None) -> None:
    """Only an engine reads a model, and takes seconds to start: a wrong name is told at once."""
    if model is not None and not Path(model).expanduser().exists():
        raise ConfigError(f"no model at {model}: name a Hugging Face directory or a .gguf file")
