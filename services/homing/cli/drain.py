"""`homing drain RANK`: take an engine rank out of a running fleet without losing a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class DrainConfig:
    """Let a rank finish what it has, and leave; what it cannot finish in time goes on elsewhere.

    Its process ends; under `homing serve` another takes its place: draining one rank after another
    restarts them all, and loses nothing.
    """

    rank: tyro.conf.Positional[int]
    """The engine rank."""
    coordinator: str
    """The coordinator's address, such as tcp://127.0.0.1:7000; its log says it."""
    timeout_s: float = 30.0
    """How long the rank may go on working."""
    keys: Path | None = None
    """A client's key file, or its directory, for a coordinator that asks for keys."""


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(DrainConfig, prog="homing drain", args=argv)
    asyncio.run(_drain(config))
    print(f"rank {config.rank} has left")
    return 0


async def _drain(config: DrainConfig) -> None:
    from homing.client import Client

    client = Client(config.coordinator, keys=config.keys)
    try:
        await client.start()
        await client.drain(config.rank, timeout_s=config.timeout_s)
    finally:
        await client.close()
