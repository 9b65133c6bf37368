"""A small engine on a real model, driven step by step; gathers what each request was answered."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from homing.engine.engine import Engine, RequestOutput
from homing.engine.kv_cache import KVCache
from homing.engine.limits import EngineLimits
from homing.engine.log_probs import LogProbs
from homing.engine.models import Model
from homing.wire import Finish

BLOCK_SIZE = 16


def small_engine(model: Model, num_blocks: int, **limits: Any) -> Engine:
    """With blocks of `BLOCK_SIZE`. `limits`: other fields of `EngineLimits`."""
    defaults: dict[str, Any] = {
        "max_context_tokens": 256,
        "max_batch_requests": 8,
        "max_step_tokens": 64,
        "max_queued_requests": 100,
    }
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    cache = KVCache.allocate(model.shape, **sizes)
    return Engine(model, cache, None, EngineLimits(**sizes, **defaults | limits))


@dataclass
class Answer:
    """All outputs of one request. Compared by their bits."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[bytes] = field(default_factory=list)
    """For each token: its log-probability, the ids of the most probable ones, and theirs."""
    prompt_log_probs: list[bytes] | None = None
    num_cached_tokens: int | None = None
    finish: Finish | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish is None, "an output came after the end"
        assert output.is_first == (self.num_cached_tokens is None)
        self.token_ids += output.token_ids
        if output.log_probs is not None:
            self.log_probs += bits(output.log_probs)
        if output.is_first:
            self.num_cached_tokens = output.request.num_cached_at_start or 0
        if output.prompt_log_probs is not None:
            assert output.is_first
            self.prompt_log_probs = bits(output.prompt_log_probs)
        self.finish = output.finish


def bits(scores: LogProbs) -> list[bytes]:
    rows = zip(scores.chosen, scores.top_ids, scores.top, strict=True)
    return [b"".join(array.tobytes() for array in row) for row in rows]


def run(
    engine: Engine,
    answers: dict[Hashable, Answer] | None = None,
    *,
    max_steps: int = 10_000,
    before_step: Callable[[int], None] = lambda _: None,
) -> dict[Hashable, Answer]:
    """Step until there is no work, checking all invariants after each step."""
    answers = {} if answers is None else answers
    for number in range(max_steps):
        before_step(number)
        if not engine.has_work:
            return answers
        for output in engine.step():
            answers.setdefault(output.request.key, Answer()).add(output)
        engine.scheduler.check()
    raise AssertionError(f"the engine was not done after {max_steps} steps")
