"""The life of one rank: find the others, start this rank's processes, stop with the primary."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

from homing.launch.commands import coordinator_command, engine_commands, frontend_commands
from homing.launch.config import LaunchConfig
from homing.launch.family import Command, Family
from homing.launch.listeners import open_listeners
from homing.launch.serve import announce, check_model, lifeline, supervise
from homing.launch.torchrun.config import JobRank, TorchrunConfig
from homing.launch.torchrun.rendezvous import Rendezvous
from homing.observe import configure_logging


def serve_rank(torchrun: TorchrunConfig, job: JobRank) -> int:
    """Serve until a signal asks to stop or the primary rank has ended; 0 after a clean stop."""
    config = torchrun.of_rank(job)
    configure_logging(f"launch-{job.rank}", verbose=config.verbose)
    check_model(config.model)
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        if torchrun.serves_http(job):
            listeners = open_listeners(config.host, config.port, config.frontend_replicas)
            for listener in listeners:
                stack.enter_context(listener)
        rendezvous = Rendezvous(job, config.start_timeout_s)
        if job.is_primary:
            stack.callback(rendezvous.publish_end)
        address = stack.enter_context(coordinator_address(config, rendezvous, job))
        lifeline_fd = stack.enter_context(lifeline())
        family = Family(
            stop_order=[
                frontend_commands(config, address, listeners, lifeline_fd),
                *rank_commands(config, job, address, lifeline_fd),
            ]
        )

        async def beside(stop: asyncio.Event) -> None:
            if job.is_primary:
                await announce(config, family, listeners[0])
                rendezvous.publish_ready()
            else:
                await follow(rendezvous, family)
                stop.set()

        asyncio.run(supervise(family, beside))
    return 0


@contextlib.contextmanager
def coordinator_address(
    config: LaunchConfig, rendezvous: Rendezvous, job: JobRank
) -> Iterator[str]:
    """The address at which this rank reaches the coordinator. The primary chooses it: with keys,
    one for all machines."""
    if not job.is_primary:
        yield rendezvous.address()
        return
    # Bound, but not listening: nobody else is given the port, and a coordinator can be started on
    # it again and again.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        port = _port(config.coordinator_bind or "") or reserved.getsockname()[1]
        address = f"tcp://{job.primary_host if config.keys else '127.0.0.1'}:{port}"
        rendezvous.publish_address(address, for_this_machine=not config.keys)
        yield address


def rank_commands(
    config: LaunchConfig, job: JobRank, address: str, lifeline_fd: int
) -> Sequence[Sequence[Command]]:
    """This rank's engine and, on the primary, the coordinator; in the order in which they stop."""
    engine = engine_commands(config, address, lifeline_fd)[job.rank]
    if not job.is_primary:
        return [[engine]]
    bind = config.coordinator_bind or f"tcp://{'0.0.0.0' if config.keys else '127.0.0.1'}"
    if not _port(bind):
        bind = f"{bind.removesuffix(':0')}:{_port(address)}"
    return [[engine], [coordinator_command(config, bind, lifeline_fd)]]


def _port(address: str) -> int:
    """Of tcp://HOST:PORT; 0 where it names none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


async def follow(rendezvous: Rendezvous, family: Family) -> None:
    """The part of a rank that is not the primary: until that one goes."""
    await rendezvous.ready()
    family.mark_ready()
    await rendezvous.end()
