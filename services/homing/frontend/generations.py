"""The generations of one HTTP request: submitted together, and gone when their client is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct

from homing.client import Client, Generation, Part
from homing.errors import HomingError
from homing.frontend.thinking import Submit, ThinkingGeneration, ThinkingLimit
from homing.frontend.tokenizing import Prompt
from homing.params import SamplingParams

SEEDS = 2**64
MAX_PARTS = 256
"""That are handed out at once."""
MAX_WAITING = 64
"""Parts that wait for a slow reader before later ones are joined to them: a token then costs a few
bytes instead of a few hundred."""
SHORTEST_S = 1e-3
"""What is left of a time limit that has passed."""


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What all generations of a request have in common."""

    request_id: str
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    tenant: int | None = None


class _Waiting(Struct):
    """A part of choice `index` that was not handed out yet, or was taken."""

    index: int
    part: Part
    taken: bool = False


class Generations:
    """The parts of all choices, in the order in which they come.

    They belong to the task that submits them. However that task ends, whatever is still running is
    cancelled: a client that leaves ends the task that serves it, streamed or not.
    """

    def __init__(self) -> None:
        self._generations: list[Generation | ThinkingGeneration] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._last: dict[int, _Waiting] = {}  # choice -> its latest part
        self._items: asyncio.Queue[_Waiting | HomingError | None] = asyncio.Queue()
        self._error: HomingError | None = None  # that `next` still has to raise
        self._ticking: asyncio.TimerHandle | None = None
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
        options: SubmitOptions,
        thinking: ThinkingLimit | None = None,
    ) -> None:
        """Start `num_choices` generations for each prompt; choice k of a prompt has seed + k.

        Raises what `Client.submit` raises; the owner then ends, and what was started with it.
        """
        for prompt in prompts:
            submit = _submitter(client, options, prompt.request_id)
            for k in range(num_choices):
                self._generations.append(
                    _start(submit, prompt.packed, _choice_params(params, k), thinking)
                )
        for index, generation in enumerate(self._generations):
            take = partial(self._take, index)
            if isinstance(generation, ThinkingGeneration):
                self._pumps.append(asyncio.create_task(_pump(generation, take)))
            else:
                generation.follow(take)

    def tick(self, every_s: float) -> None:
        """From now on `next` returns after so long at the latest, and again and again."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._ticking = asyncio.get_running_loop().call_later(every_s, self._on_tick, every_s)

    async def next(self) -> list[tuple[int, Part]]:
        """The parts that have come, each with the index of its choice; at least one, or none after
        a tick.

        A consumer that is slower than the engines gets many at once. Raises the error that ended a
        generation, behind the parts before it. Do not call after every choice has finished.
        """
        if self._error is not None:
            raise self._error
        item = await self._items.get()
        parts: list[tuple[int, Part]] = []
        while True:
            if isinstance(item, HomingError):
                if not parts:
                    raise item
                self._error = item
                return parts
            if item is not None:
                item.taken = True
                parts.append((item.index, item.part))
            if self._items.empty() or len(parts) >= MAX_PARTS:
                return parts
            item = self._items.get_nowait()

    def _on_tick(self, every_s: float) -> None:
        self._items.put_nowait(None)
        self.tick(every_s)

    def _take(self, index: int, item: Part | HomingError) -> None:
        """What came of choice `index`."""
        if isinstance(item, HomingError):
            self._items.put_nowait(item)
            return
        last = self._last.get(index)
        crowded = self._items.qsize() >= MAX_WAITING
        if crowded and last and not last.taken and last.part.can_take(item):
            last.part = last.part.joined(item)
            return
        self._last[index] = _Waiting(index, item)
        self._items.put_nowait(self._last[index])

    def _cancel(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for generation in self._generations:
            generation.cancel()
        for pump in self._pumps:
            pump.cancel()
        # Each refers to this object, and holds its prompt: a cycle, which only a full collection
        # would take apart.
        for held in (self._generations, self._pumps, self._last):
            held.clear()


def _start(
    submit: Submit, prompt: bytes, params: SamplingParams, thinking: ThinkingLimit | None
) -> Generation | ThinkingGeneration:
    if thinking is None:
        return submit(prompt, params, 0)
    return ThinkingGeneration(submit, prompt, params, thinking)


async def _pump(generation: ThinkingGeneration, take: Callable[[Part | HomingError], None]) -> None:
    try:
        async for part in generation:
            take(part)
    except HomingError as error:
        take(error)


def _submitter(client: Client, options: SubmitOptions, name: str | None) -> Submit:
    now = asyncio.get_running_loop().time
    deadline = None if options.timeout_s is None else now() + options.timeout_s

    def submit(tokens: bytes, params: SamplingParams, num_resumed: int) -> Generation:
        return client.submit(
            tokens,
            params,
            cache_salt=options.cache_salt,
            external_id=name or options.request_id,
            num_resumed_tokens=num_resumed,
            priority=options.priority,
            tenant=options.tenant,
            timeout_s=None if deadline is None else max(SHORTEST_S, deadline - now()),
        )

    return submit


def _choice_params(params: SamplingParams, k: int) -> SamplingParams:
    if params.seed is None or k == 0:
        return params
    seed = (params.seed + k + SEEDS // 2) % SEEDS - SEEDS // 2  # stays within 64 bits
    return msgspec.structs.replace(params, seed=seed)
