"""Requests through a coordinator: prompts to the client, its parts to answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from homing import params
from homing.client import Client, Generation
from homing.errors import HomingError
from homing.llm.answer import Answer
from homing.llm.params import SamplingParams
from homing.llm.prompts import Batch, Prompt, prepare
from homing.llm.results import Delta, Result
from homing.llm.text import TextCodec, TextHooks
from homing.tokenizer import Tokenizer
from homing.wire import ModelCard, pack_tokens

OnDelta: TypeAlias = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked, and can be submitted."""

    sampling: SamplingParams
    prompt: Prompt
    for_engine: params.SamplingParams


class Requests:
    """Those of one client. On its event loop; tokenizing is on a thread beside it."""

    def __init__(
        self, client: Client, card: ModelCard, hooks: TextHooks, *, max_unfinished: int
    ) -> None:
        """max_unfinished: of the requests asked for, so many are in the fleet at a time; the others
        wait here."""
        self._client = client
        self._card = card
        # A tokenizer is for one thread: one encodes beside the loop, the other decodes on it.
        self._encoding = TextCodec(Tokenizer.from_dir(card.tokenizer_dir), hooks)
        self._decoding = TextCodec(Tokenizer.from_dir(card.tokenizer_dir), hooks)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="homing-tokenizer")
        self._window = asyncio.Semaphore(max_unfinished)
        self._request_ids = count(1)
        self._running: dict[int, Generation] = {}

    async def generate(self, batch: Batch, on_delta: OnDelta) -> list[Result]:
        """See all of them to their ends; the results are in the order of the prompts.

        Raises `InvalidRequest` before any is started.
        """
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._tokenizing, self._prepare, batch)
        tasks = [
            asyncio.create_task(self._run(item, index, on_delta))
            for index, item in enumerate(prepared)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _prepare(self, batch: Batch) -> list[Prepared]:
        batch.check_media(self._card)
        return [
            Prepared(wanted, *prepare(prompt, wanted, self._encoding, self._card))
            for prompt, wanted in zip(batch.prompts, batch.sampling, strict=True)
        ]

    async def _run(self, item: Prepared, index: int, on_delta: OnDelta) -> Result:
        async with self._window:
            request_id = next(self._request_ids)
            answer = Answer(
                request_id, index, item.prompt, item.sampling, item.for_engine, self._decoding
            )
            try:
                last = await self._follow(request_id, item, answer, on_delta)
            except HomingError as error:
                last = answer.fail(error)
            finally:
                if generation := self._running.pop(request_id, None):
                    generation.cancel()
            on_delta(last)
            assert last.result is not None
            return last.result

    async def _follow(
        self, request_id: int, item: Prepared, answer: Answer, on_delta: OnDelta
    ) -> Delta:
        """Submit, and hand on what comes but for the last delta, which is returned."""
        generation = self._client.submit(
            pack_tokens(item.prompt.all_tokens),
            item.for_engine,
            num_resumed_tokens=len(item.prompt.resumed_tokens),
            priority=item.sampling.priority,
        )
        self._running[request_id] = generation
        async for part in generation:
            delta = answer.push(part)
            if delta is not None and delta.result is not None:
                return delta
            if delta is not None:
                on_delta(delta)
        raise AssertionError("a generation ends with a finish or an error")

    async def abort(self, request_ids: Sequence[int] | None) -> None:
        """End these, or all that are in the fleet."""
        for request_id in list(self._running) if request_ids is None else request_ids:
            if generation := self._running.get(request_id):
                await generation.abort()

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
