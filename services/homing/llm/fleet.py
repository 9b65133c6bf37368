"""The processes of a coordinator mode: coordinator, engines, frontends if asked, and the client.

Everything here is for one event loop. Alone, this process starts all of them; as a rank of a
torchrun job it starts its own engine and, on the primary rank, the coordinator.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from homing.client import Client
from homing.errors import HomingError
from homing.launch.commands import coordinator_command, engine_commands, frontend_commands
from homing.launch.config import LaunchConfig
from homing.launch.family import Command as ProcessCommand
from homing.launch.family import Family
from homing.launch.listeners import open_listeners
from homing.launch.readiness import Fleet as HttpFleet
from homing.launch.readiness import wait_until_ready
from homing.launch.serve import LOOPBACK_OF_ANY, lifeline, private_address
from homing.launch.torchrun.config import JobRank
from homing.llm.config import ServeConfig
from homing.llm.loop_thread import SHUT_DOWN
from homing.llm.requests import Requests
from homing.llm.text import TextHooks

log = logging.getLogger(__name__)

MAX_UNFINISHED_PER_ENGINE = 1024
"""Requests that an engine is given before it has answered others: enough to fill many batches, and
below what a fleet refuses."""

T = TypeVar("T")


class Fleet:
    def __init__(
        self, config: LaunchConfig, hooks: TextHooks, job: JobRank | None, resources: ExitStack
    ) -> None:
        """`config` says how many engines; `resources` are closed after the last process."""
        self._config = config
        self._hooks = hooks
        self._job = job
        self._resources = resources
        self._families: list[tuple[Family, asyncio.Task[None]]] = []
        self._client: Client | None = None
        self._requests: Requests | None = None
        self._following: asyncio.Task[None] | None = None
        self._closing = False
        self._closed = asyncio.Event()

    @property
    def client(self) -> Client:
        assert self._client is not None, "only the primary rank has a client"
        return self._client

    @property
    def requests(self) -> Requests:
        assert self._requests is not None, "only the primary rank has a client"
        return self._requests

    async def start(self) -> None:
        """Until every engine serves. Raises ConfigError or Unavailable, and leaves nothing then."""
        try:
            if self._job is None:
                self._address = self._resources.enter_context(private_address())
                self._lifeline_fd = self._resources.enter_context(lifeline())
                await self._start_alone()
            else:
                self._lifeline_fd = self._resources.enter_context(lifeline())
                await self._start_in_job(self._job)
        except BaseException:
            await self.close()
            raise

    async def _start_alone(self) -> None:
        engines = engine_commands(self._config, self._address, self._lifeline_fd)
        coordinator = coordinator_command(self._config, self._address, self._lifeline_fd)
        family, keeper = self._keep([engines, [coordinator]])
        await _unless_it_fails(keeper, self._join())
        family.mark_ready()

    async def _start_in_job(self, job: JobRank) -> None:
        # It loads torch, which finds the other ranks.
        from homing.launch.torchrun.rendezvous import Rendezvous
        from homing.launch.torchrun.serve import coordinator_address, follow, rank_commands

        timeout_s = self._config.start_timeout_s
        rendezvous = await asyncio.to_thread(Rendezvous, job, timeout_s)
        if job.is_primary:
            self._resources.callback(rendezvous.publish_end)
        self._address = await asyncio.to_thread(
            self._resources.enter_context, coordinator_address(self._config, rendezvous, job)
        )
        family, keeper = self._keep(
            rank_commands(self._config, job, self._address, self._lifeline_fd)
        )
        if job.is_primary:
            await _unless_it_fails(keeper, self._join())
            rendezvous.publish_ready()
        else:
            await _unless_it_fails(keeper, rendezvous.ready())
            self._following = asyncio.create_task(self._close_after(follow(rendezvous, family)))
        family.mark_ready()

    async def _join(self) -> None:
        timeout_s = self._config.start_timeout_s
        num_engines = self._config.data_parallel_size
        max_unfinished = MAX_UNFINISHED_PER_ENGINE * num_engines
        self._client = Client(self._address, max_inflight=max_unfinished, keys=self._config.keys)
        await self._client.start(timeout_s)
        await self._client.wait_for_ranks(num_engines, timeout_s)
        card = await self._client.wait_for_model(timeout_s)
        self._requests = Requests(self._client, card, self._hooks, max_unfinished=max_unfinished)

    def _keep(
        self, stop_order: Sequence[Sequence[ProcessCommand]]
    ) -> tuple[Family, asyncio.Task[None]]:
        family = Family(stop_order)
        keeper = asyncio.create_task(family.keep_running())
        self._families.append((family, keeper))
        return family, keeper

    async def serve(self, config: ServeConfig) -> str:
        """Start frontends; returns their URL once all of them answer."""
        launch = dataclasses.replace(
            self._config,
            host=config.host,
            port=config.port,
            frontend_replicas=config.frontend_replicas,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            verbose=config.verbose,
        )
        listeners = open_listeners(config.host, config.port, config.frontend_replicas)
        for listener in listeners:
            self._resources.enter_context(listener)
        family, keeper = self._keep(
            [frontend_commands(launch, self._address, listeners, self._lifeline_fd)]
        )
        address, port = listeners[0].getsockname()[:2]
        fleet = HttpFleet(
            host=LOOPBACK_OF_ANY.get(address) or address,
            port=port,
            num_frontends=config.frontend_replicas,
            num_ranks=1,
        )
        ready = wait_until_ready(fleet, timeout_s=self._config.start_timeout_s)
        await _unless_it_fails(keeper, ready)
        family.mark_ready()
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop the frontends, the client, the engines, the coordinator. Idempotent."""
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        if self._following is not None and self._following is not asyncio.current_task():
            self._following.cancel()
        *frontends, engines = reversed(self._families) if self._families else [None]
        for family in frontends:
            await _stop(family)
        if self._requests is not None:
            self._requests.close()
        if self._client is not None:
            await self._client.close()
        await _stop(engines)
        self._resources.close()
        self._closed.set()

    async def closed(self) -> None:
        """Wait for the end, whoever brings it about."""
        await self._closed.wait()

    async def _close_after(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        await self.close()


async def _stop(kept: tuple[Family, asyncio.Task[None]] | None) -> None:
    if kept is not None:
        family, keeper = kept
        keeper.cancel()
        with suppress(asyncio.CancelledError, HomingError):
            await keeper
        await family.stop()


async def _unless_it_fails(keeper: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """Do the work while the processes are kept running; if they cannot be, raise why."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if keeper.cancelled():
            raise RuntimeError(SHUT_DOWN)
        if keeper.done():
            keeper.result()
        return await task
    finally:
        task.cancel()
