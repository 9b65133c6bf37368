"""`homing bench soak`: random traffic on a small cache, and whether anything leaks or goes wrong.

One engine in this process. Each of a number of questions is asked alone first. Then requests for
these questions arrive at random, more than the cache has room for, so that they are preempted all
the time; some are aborted, some run past a deadline, now and then the prefix cache is emptied.
Every answer must be, to the bit, what the question was answered alone, or the beginning of it if
it was cut off; afterwards no block may be held, and the process's memory must not have grown.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import tyro
from numpy.typing import NDArray

from homing.engine.engine import Engine, RequestOutput
from homing.engine.kv_cache import KVCache
from homing.engine.limits import EngineLimits
from homing.engine.weights import load_model, resolve_model
from homing.errors import ConfigError
from homing.native import default_cache_dir
from homing.params import SamplingParams
from homing.wire import FinishReason

MIB = 2**20
CONTEXT_TOKENS = 128
MAX_GROWN_MIB = 8
"""What allocators may yet take; a leak goes on."""
WARM_UP = 0.25
"""Share of the requests after which memory should have stopped to grow."""


@dataclass(frozen=True)
class SoakBenchConfig:
    """Let random requests loose on one engine and check every answer; print one JSON object."""

    model: Annotated[str | None, tyro.conf.Positional] = None
    """Hugging Face directory or .gguf file. None: the demo model."""
    dtype: str = "bf16"
    """bf16, fp16 or fp32."""
    requests: int = 5000
    questions: int = 64
    """Different ones; requests repeat them."""
    in_flight: int = 24
    """Requests that are there at a time, at most."""
    cache_tokens: int = 512
    """Of the KV cache: fewer than the requests in flight need."""
    seed: int = 0
    num_threads: int = len(os.sched_getaffinity(0))

    def __post_init__(self) -> None:
        if min(self.requests, self.questions, self.in_flight, self.num_threads) < 1:
            raise ConfigError("--requests, --questions, --in-flight, --num-threads start at 1")
        if self.cache_tokens < CONTEXT_TOKENS:
            raise ConfigError(f"--cache-tokens is {self.cache_tokens}; at least {CONTEXT_TOKENS}")


@dataclass(frozen=True)
class Question:
    prompt: NDArray[np.int64]
    params: SamplingParams


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[bytes] = field(default_factory=list)
    """Of each token, by its bits."""
    ends: list[FinishReason] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        if output.log_probs is not None:
            self.log_probs += [chosen.tobytes() for chosen in output.log_probs.chosen]
        if output.finish is not None:
            self.ends.append(output.finish.reason)

    def agrees_with(self, alone: Answer) -> bool:
        """Ended once, and the same, or cut off and the beginning of the same."""
        length = len(self.token_ids)
        same = self.token_ids == alone.token_ids[:length]
        same &= self.log_probs == alone.log_probs[:length]
        return same and (self.ends == alone.ends or self.ends == [FinishReason.ABORT])


class Soak:
    def __init__(self, engine: Engine, config: SoakBenchConfig, vocab_size: int) -> None:
        self._engine = engine
        self._config = config
        self._random = random.Random(config.seed)
        shared = [self._tokens(40, vocab_size) for _ in range(4)]
        self._questions = [self._question(shared, vocab_size) for _ in range(config.questions)]
        self._alone = [self._ask_alone(question) for question in self._questions]
        self._open: dict[int, Answer] = {}
        self._asked: dict[int, int] = {}  # request -> question
        self.ends: Counter[str] = Counter()
        self.wrong: list[int] = []
        self.num_steps = self.num_tokens = 0

    def run(self) -> None:
        """Until every request has ended."""
        to_come = iter(range(self._config.requests))
        number: int | None = next(to_come)
        while number is not None or self._engine.has_work:
            while number is not None and self._arrives():
                self._add(number)
                number = next(to_come, None)
            self._disturb()
            self.num_steps += 1
            self._engine.expire(float(self.num_steps))
            for output in self._engine.step():
                self._take(output)
        self.wrong += self._open  # those that never ended

    def _arrives(self) -> bool:
        if not self._engine.has_work:
            return True
        return len(self._open) < self._config.in_flight and self._random.random() < 0.7

    def _add(self, number: int) -> None:
        question = self._random.randrange(len(self._questions))
        asked = self._questions[question]
        self._open[number], self._asked[number] = Answer(), question
        deadline = self.num_steps + 20.0 if self._random.random() < 0.03 else None
        priority = self._random.choice((0, 0, 0, -1, 1))
        self._engine.add_request(
            number, asked.prompt, asked.params, priority=priority, deadline=deadline
        )

    def _disturb(self) -> None:
        if self._open and self._random.random() < 0.05:
            self._engine.abort(self._random.choice(list(self._open)))
        if self._random.random() < 0.002:
            self._engine.lifecycle.reset_prefix_cache()

    def _take(self, output: RequestOutput) -> None:
        number = output.request.key
        assert isinstance(number, int)
        answer = self._open.get(number)
        if answer is None:  # ended before
            self.wrong.append(number)
            return
        answer.add(output)
        self.num_tokens += len(output.token_ids)
        if output.finish is not None:
            self.ends[output.finish.reason.value] += 1
            del self._open[number]
            if not answer.agrees_with(self._alone[self._asked.pop(number)]):
                self.wrong.append(number)

    def _question(self, shared: list[list[int]], vocab_size: int) -> Question:
        """Often it begins as others do, and it is answered in one of many ways."""
        source = self._random
        begin = source.choice(shared)[: source.choice((0, 16, 32, 40))]
        prompt = begin + self._tokens(source.randrange(1, 40), vocab_size)
        params = SamplingParams(
            temperature=source.choice((0.0, 0.8, 1.5)),
            top_p=source.choice((0.0, 0.9)),
            seed=source.randrange(1000),
            num_tokens_to_generate=source.randrange(1, 40),
            repetition_penalty=source.choice((1.0, 1.0, 1.2)),
            return_log_probs=source.random() < 0.3,
            skip_prompt_log_probs=True,
        )
        return Question(np.array(prompt), params)

    def _tokens(self, count: int, vocab_size: int) -> list[int]:
        return [self._random.randrange(8, vocab_size) for _ in range(count)]

    def _ask_alone(self, question: Question) -> Answer:
        answer = Answer()
        self._engine.lifecycle.reset_prefix_cache()
        self._engine.add_request("alone", question.prompt, question.params)
        while self._engine.has_work:
            for output in self._engine.step():
                answer.add(output)
        return answer


def run(config: SoakBenchConfig) -> dict[str, Any]:
    """Let it all loose twice: a quarter of the requests, then, memory noted, as many as asked."""
    engine, vocab_size = _load(config)
    warm_up = Soak(engine, _part(config), vocab_size)
    warm_up.run()
    soak = Soak(engine, config, vocab_size)
    process = psutil.Process()
    before_mib = process.memory_info().rss / MIB
    preemptions = engine.scheduler.num_preemptions
    start = time.perf_counter()
    soak.run()
    seconds = time.perf_counter() - start
    engine.scheduler.check()
    engine.block_pool.check([])
    result = {
        "requests": config.requests,
        "ends": dict(soak.ends),
        "preemptions": engine.scheduler.num_preemptions - preemptions,
        "steps": soak.num_steps,
        "tokens": soak.num_tokens,
        "wrong_answers": len(soak.wrong) + len(warm_up.wrong),
        "blocks_held": engine.block_pool.num_held,
        "unfinished_requests": engine.num_unfinished_requests,
        "rss_before_mib": round(before_mib, 1),
        "rss_grown_mib": round(process.memory_info().rss / MIB - before_mib, 1),
        "seconds": round(seconds, 2),
    }
    engine.close()
    return {"bench": "soak", **asdict(config), "results": [result]}


def _part(config: SoakBenchConfig) -> SoakBenchConfig:
    return replace(config, requests=max(1, int(config.requests * WARM_UP)))


def _load(config: SoakBenchConfig) -> tuple[Engine, int]:
    torch.set_num_threads(config.num_threads)
    cache_dir = default_cache_dir(os.environ)
    model = load_model(
        resolve_model(config.model, cache_dir=cache_dir),
        dtype=config.dtype,
        num_threads=config.num_threads,
        cache_dir=cache_dir,
    )
    limits = EngineLimits(
        num_blocks=config.cache_tokens // 16 + 1,
        block_size=16,
        max_context_tokens=CONTEXT_TOKENS,
        max_batch_requests=16,
        max_step_tokens=64,
        max_queued_requests=config.in_flight,
    )
    cache = KVCache.allocate(model.shape, limits.num_blocks, limits.block_size)
    return Engine(model, cache, None, limits), model.shape.vocab_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and print its JSON; 1 if anything went wrong or was left."""
    config = tyro.cli(SoakBenchConfig, prog="homing bench soak", args=argv)
    report = run(config)
    json.dump(report, sys.stdout, indent=2)
    print()
    [result] = report["results"]
    left = ("wrong_answers", "blocks_held", "unfinished_requests")
    return int(any(result[name] for name in left) or result["rss_grown_mib"] > MAX_GROWN_MIB)


if __name__ == "__main__":
    sys.exit(main())
