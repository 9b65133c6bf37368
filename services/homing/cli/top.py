"""`homing top`: a live view of the fleet in the terminal."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from homing.errors import ConfigError, Unavailable

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class TopConfig:
    """Show the ranks, their load, KV use, prefix hits and tokens/s, until Ctrl-C."""

    url: str = "http://127.0.0.1:5000"
    """Base URL of a server."""
    coordinator: str | None = None
    """Address of the coordinator, to ask that instead."""
    keys: Path | None = None
    """A client's key file, or its directory, for a coordinator that asks for keys."""
    api_key: str | None = None
    """For a server that asks for one."""
    interval_s: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Take two looks, print one table and end."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.interval_s <= 3600:
            raise ConfigError(f"interval_s is {self.interval_s}; it must be from 0.05 to 3600")


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(TopConfig, prog="homing top", args=argv)
    asyncio.run(_show(config))
    return 0


async def _show(config: TopConfig) -> None:
    from rich.console import Console
    from rich.live import Live

    from homing.cli.fleet_table import Sample, fleet_view

    console, earlier = Console(), None
    looks = _from_coordinator(config) if config.coordinator else _from_server(config)
    if config.once:
        first = Sample(time.monotonic(), await anext(looks))
        second = Sample(time.monotonic(), await anext(looks))
        console.print(fleet_view(second, first))
        await looks.aclose()
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        async for fleet in looks:
            sample = Sample(time.monotonic(), fleet)
            live.update(fleet_view(sample, earlier), refresh=True)
            earlier = sample


async def _from_coordinator(config: TopConfig) -> AsyncGenerator[dict[str, Any], None]:
    from homing.client import Client

    assert config.coordinator is not None
    client = Client(config.coordinator, keys=config.keys)
    try:
        await client.start()
        while True:
            yield await client.stats(timeout_s=TIMEOUT_S)
            await asyncio.sleep(config.interval_s)
    finally:
        await client.close()


async def _from_server(config: TopConfig) -> AsyncGenerator[dict[str, Any], None]:
    while True:
        yield await asyncio.to_thread(_get_fleet, config)
        await asyncio.sleep(config.interval_s)


def _get_fleet(config: TopConfig) -> dict[str, Any]:
    url = config.url.rstrip("/") + "/fleet"
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot read {url}: {error}") from None
