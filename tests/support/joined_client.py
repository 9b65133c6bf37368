"""A client that has joined a scripted coordinator, and what the two say to each other."""

from __future__ import annotations

import array
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from homing.client import Client, Generation, Part
from homing.wire import Delta, Finish, FinishReason, Fleet, FleetState, Output, pack_payload
from tests.support.scripted_coordinator import ScriptedCoordinator


def uint32(*ids: int) -> bytes:
    return array.array("I", ids).tobytes()


def float32(*values: float) -> bytes:
    return array.array("f", values).tobytes()


def output(client: Client, *deltas: Delta) -> Output:
    return Output(client._session.uid, len(deltas), 0, None, pack_payload(list(deltas)))


STOPPED = Finish(FinishReason.STOP, 2)


@asynccontextmanager
async def joined(
    *, reads_prefixes: bool = True, **options: Any
) -> AsyncIterator[tuple[ScriptedCoordinator, Client, bytes]]:
    """A coordinator, a client that has joined it, and the client's identity."""
    with ScriptedCoordinator() as coordinator:
        client = Client(coordinator.address, **options)
        starting = asyncio.create_task(client.start(30))
        peer = await coordinator.welcome(reads_prefixes=reads_prefixes)
        await starting
        try:
            yield coordinator, client, peer
        finally:
            await client.close()


async def parts_of(generation: Generation) -> list[Part]:
    return [part async for part in generation]


def fleet_of(sequence: int, *, live_ranks: int) -> Fleet:
    return Fleet(sequence, FleetState.RUNNING, 0, "prefix_affinity", True, live_ranks)
