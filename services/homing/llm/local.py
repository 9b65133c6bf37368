"""Batches and streams on an engine in this process, stepped by whoever waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from homing.llm.prompts import Batch
from homing.llm.results import Delta, Result

if TYPE_CHECKING:
    from homing.llm.engine import Engine

MAX_BATCHES_AHEAD = 4
"""Requests that an engine holds at a time, in batches: others wait outside, where they cost
less."""


def generate(engine: Engine, batch: Batch, on_delta: Callable[[Delta], None]) -> list[Result]:
    """The results in the order of the prompts."""
    results: dict[int, Result] = {}
    for delta in deltas(engine, batch):
        on_delta(delta)
        if delta.result is not None:
            results[delta.index] = delta.result
    return [results[index] for index in range(len(batch))]


def deltas(engine: Engine, batch: Batch) -> Iterator[Delta]:
    """Everything new, as it comes. All are checked before the first is started; what is unfinished
    when the iterator is left is aborted."""
    batch.check_media(engine.card)
    pairs = zip(batch.prompts, batch.sampling, strict=True)
    waiting = deque(
        (index, wanted, *engine.prepare(prompt, wanted))
        for index, (prompt, wanted) in enumerate(pairs)
    )
    most = MAX_BATCHES_AHEAD * engine.core.limits.max_batch_requests
    inbox: deque[Delta] = deque()
    running: set[int] = set()
    try:
        while waiting or running:
            while waiting and len(running) < most:
                index, wanted, prompt, for_engine = waiting.popleft()
                running.add(
                    engine.start(prompt, wanted, for_engine, index=index, on_delta=inbox.append)
                )
            if not inbox:
                engine.step_aside()
            while inbox:
                delta = inbox.popleft()
                if delta.result is not None:
                    running.discard(delta.request_id)
                yield delta
    finally:
        for request_id in running:
            engine.abort(request_id)
