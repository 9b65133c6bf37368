"""The generations of one HTTP request: submitted together, and gone when their client is."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import msgspec

from homing.client import Client, Generation, Part
from homing.errors import HomingError
from homing.frontend.tokenizing import Prompt
from homing.params import SamplingParams

SEEDS = 2**64


class Generations:
    """The parts of all choices, in the order in which they come.

    They belong to the task that submits them. However that task ends, whatever is still running is
    cancelled: a client that leaves ends the task that serves it, streamed or not.
    """

    def __init__(self) -> None:
        self._generations: list[Generation] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._parts: asyncio.Queue[tuple[int, Part] | HomingError] = asyncio.Queue()
        owner = asyncio.current_task()
        assert owner is not None
        owner.add_done_callback(lambda _: self._cancel())

    def submit(
        self,
        client: Client,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        num_choices: int,
        cache_salt: str,
        request_id: str,
        priority: int,
        timeout_s: float | None,
    ) -> None:
        """Start `num_choices` generations for each prompt; choice k of a prompt has seed + k.

        Raises what `Client.submit` raises; the owner then ends, and what was started with it.
        """
        for prompt in prompts:
            tokens = struct.pack(f"<{len(prompt.token_ids)}I", *prompt.token_ids)
            for k in range(num_choices):
                generation = client.submit(
                    tokens,
                    _choice_params(params, k),
                    cache_salt=cache_salt,
                    external_id=prompt.request_id or request_id,
                    priority=priority,
                    timeout_s=timeout_s,
                )
                self._generations.append(generation)
        for index, generation in enumerate(self._generations):
            self._pumps.append(asyncio.create_task(self._pump(index, generation)))

    async def next(self, timeout_s: float | None = None) -> tuple[int, Part] | None:
        """The next part and the index of its choice; None if none comes in time.

        Raises the error that ended a generation. Do not call again after every choice has finished.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._parts.get()
        except TimeoutError:
            return None
        if isinstance(item, HomingError):
            raise item
        return item

    async def _pump(self, index: int, generation: Generation) -> None:
        try:
            async for part in generation:
                self._parts.put_nowait((index, part))
        except HomingError as error:
            self._parts.put_nowait(error)

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()
        for pump in self._pumps:
            pump.cancel()


def _choice_params(params: SamplingParams, k: int) -> SamplingParams:
    if params.seed is None or k == 0:
        return params
    seed = (params.seed + k + SEEDS // 2) % SEEDS - SEEDS // 2  # stays within 64 bits
    return msgspec.structs.replace(params, seed=seed)
