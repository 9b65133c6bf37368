"""How the ranks of a job find each other: by torch.distributed's store, the one that torchrun runs.

The primary rank publishes the coordinator's address, that the fleet is ready, and its end; the
others read them. No process group is made: a trainer's own, if there is one, is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from datetime import timedelta
from itertools import count
from typing import ClassVar

import torch.distributed
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from homing.errors import ConfigError, Unavailable
from homing.launch.torchrun.config import JobRank

POLL_S = 0.3
"""How often a rank looks for news. Waiting in the store would hold it against a trainer's use of
it, and could not be given up."""


class Rendezvous:
    """One launch of a job. Every rank makes the same ones in the same order."""

    _numbers: ClassVar = count()

    def __init__(self, job: JobRank, timeout_s: float) -> None:
        """Raises Unavailable when the store does not answer in time."""
        self._timeout = timedelta(seconds=timeout_s)
        try:
            store = _store(job, self._timeout)
        except (RuntimeError, ValueError) as error:
            raise Unavailable(f"the job's store does not answer: {error}") from None
        self._store = PrefixStore(f"homing/{next(self._numbers)}", store)

    def publish_address(self, address: str, *, for_this_machine: bool) -> None:
        """By the primary rank: where the coordinator is."""
        self._store.set("address", f"{socket.gethostname() if for_this_machine else '*'} {address}")

    def address(self) -> str:
        """Wait for the coordinator's address. Raises ConfigError if it is for another machine."""
        try:
            self._store.wait(["address"], self._timeout)
        except RuntimeError as error:
            raise Unavailable(f"rank 0 did not say where the coordinator is: {error}") from None
        host, address = self._store.get("address").decode().split(" ", 1)
        if host not in ("*", socket.gethostname()):
            raise ConfigError(
                f"rank 0 is on {host}, this rank on {socket.gethostname()}: several machines need "
                "--keys, by which they know each other"
            )
        return address

    def publish_ready(self) -> None:
        self._store.set("ready", "")

    def publish_end(self) -> None:
        """By the primary rank: everyone is to stop."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which says as much
            self._store.set("end", "")

    async def ready(self) -> None:
        """Wait until the whole fleet serves, or for the end."""
        await self._either("ready", "end")

    async def end(self) -> None:
        """Wait for the end; that of the store is one, too."""
        await self._either("end")

    async def _either(self, *keys: str) -> None:
        while not self._has_any(keys):
            await asyncio.sleep(POLL_S)

    def _has_any(self, keys: tuple[str, ...]) -> bool:
        try:
            return any(self._store.check([key]) for key in keys)
        except RuntimeError:
            return True


def _store(job: JobRank, timeout: timedelta) -> Store:
    if torch.distributed.is_initialized():
        # A second store on the same port is refused where no torchrun hosts one for all.
        return torch.distributed.distributed_c10d._get_default_store()
    store, _, _ = next(rendezvous("env://", job.rank, job.world_size, timeout=timeout))
    return store
