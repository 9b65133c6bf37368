"""`homing bench engine`: what one model does in one process, beside what the machine allows.

No server, scheduler or sampling: the bare step. The limits, memory reads and fp32 products, are
measured in the same run, because they move with the machine's state and its neighbours. The bound
of a step is the longer of reading weights and KV cache once and doing its arithmetic; nothing that
uses these weights can be faster.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import tyro
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.kv_cache import KVCache, block_bytes
from homing.engine.models import Model, ModelShape
from homing.engine.weights import default_cache_dir, load_model, resolve_model

MIN_REPEATS = 3
LIMIT_SECONDS = 0.5  # for each of the two limits


@dataclass(frozen=True)
class EngineBenchConfig:
    """Measure decode and prefill of a model in this process; print one JSON object."""

    model: Annotated[str | None, tyro.conf.Positional] = None
    """Hugging Face directory or .gguf file. None: the demo model."""
    batch: str = "1,8,32"
    """Decode batch sizes, separated by commas."""
    prompt_tokens: str = "128,1024"
    """Prompt sizes: each is prefilled alone, and is the context that decoding starts from."""
    output_tokens: int = 64
    """Decode steps of each measurement; the context grows by as many tokens."""
    dtype: str = "bf16"
    """Of weights and KV cache."""
    num_threads: int = len(os.sched_getaffinity(0))
    """Threads of the model."""
    block_size: int = 16
    """Tokens of a KV block; blocks are scattered at random."""
    seconds: float = 2.0
    """At least so long is each prefill repeated."""

    @property
    def batches(self) -> list[int]:
        return [int(size) for size in self.batch.split(",")]

    @property
    def prompts(self) -> list[int]:
        return [int(size) for size in self.prompt_tokens.split(",")]


@dataclass(frozen=True)
class Limits:
    """What this machine reaches with these threads."""

    read_gb_per_s: float
    fp32_gflop_per_s: float

    def best(self, other: Limits) -> Limits:
        return Limits(
            max(self.read_gb_per_s, other.read_gb_per_s),
            max(self.fp32_gflop_per_s, other.fp32_gflop_per_s),
        )


@dataclass(frozen=True)
class Run:
    """The steps of one measurement."""

    kind: str  # decode or prefill
    batch: int  # requests
    rows: int  # tokens computed by a step
    context_tokens: int  # of each request, at the last step
    seconds: list[float]  # of each step


@dataclass(frozen=True)
class StepCost:
    """What a step must read and compute at least."""

    shape: ModelShape
    layer_weights: int  # numbers in the matrices of all layers
    head_weights: int

    @classmethod
    def of(cls, model: Model) -> StepCost:
        sizes = {
            name: math.prod(shape)
            for name, shape in model.parameter_shapes.items()
            if len(shape) == 2
        }
        embedding = sizes.pop("model.embed_tokens.weight")
        head = sizes.pop("lm_head.weight", embedding)
        return cls(model.shape, layer_weights=sum(sizes.values()), head_weights=head)

    def read_bytes(self, run: Run) -> int:
        weights = (self.layer_weights + self.head_weights) * self.shape.dtype.itemsize
        return weights + run.batch * run.context_tokens * block_bytes(self.shape, block_size=1)

    def flop(self, run: Run) -> int:
        """The head computes one row a request; a prefill row attends to half of the context."""
        products = self.layer_weights * run.rows + self.head_weights * run.batch
        attended = run.context_tokens if run.kind == "decode" else run.context_tokens // 2
        per_token = 2 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim
        return 2 * (products + run.rows * attended * per_token)


def main(argv: Sequence[str] | None = None) -> int:
    config = tyro.cli(EngineBenchConfig, args=argv, prog="homing bench engine")
    print(json.dumps(run(config), indent=2))
    return 0


def run(config: EngineBenchConfig) -> dict[str, object]:
    cache_dir = default_cache_dir(os.environ)
    files = resolve_model(config.model, cache_dir=cache_dir, on_progress=_to_stderr)
    model = load_model(
        files,
        dtype=config.dtype,
        num_threads=config.num_threads,
        cache_dir=cache_dir,
        on_progress=_to_stderr,
    )
    torch.set_num_threads(config.num_threads)
    limits = measure_limits()
    cost = StepCost.of(model)
    decodes = (
        _decode(model, config, batch=batch, context=prompt + config.output_tokens)
        for prompt in config.prompts
        for batch in config.batches
    )
    prefills = (_prefill(model, config, prompt) for prompt in config.prompts)
    runs = [*decodes, *prefills]
    limits = limits.best(measure_limits())  # neighbours come and go
    results = [_result(run, cost, limits) for run in runs]
    return {
        "model": files.name,
        "dtype": config.dtype,
        "num_threads": config.num_threads,
        "backend": type(model).__name__,
        "limits": asdict(limits),
        "results": results,
    }


def measure_limits() -> Limits:
    """With torch's own threads, which `load_model` set to the model's."""
    numbers = torch.ones(64 * 2**20)  # 256 MiB: no cache holds it
    read_s = min(_repeat(lambda: numbers.sum(), LIMIT_SECONDS))
    size = 1536
    left, right = torch.randn(2, size, size)
    product_s = min(_repeat(lambda: left @ right, LIMIT_SECONDS))
    return Limits(
        read_gb_per_s=round(numbers.nbytes / read_s / 1e9, 1),
        fp32_gflop_per_s=round(2 * size**3 / product_s / 1e9, 1),
    )


def _decode(model: Model, config: EngineBenchConfig, *, batch: int, context: int) -> Run:
    """`output_tokens` steps up to a context of `context` tokens, on random keys and values."""
    cache, tables = _filled_cache(model, config, batch, context)
    steps = [
        _batch(model.shape, config, tables, torch.full((batch,), position), torch.arange(batch))
        for position in range(context - config.output_tokens, context)
    ]
    model.forward(steps[0], cache)
    seconds = [_timed(lambda step=step: model.forward(step, cache)) for step in steps]
    return Run("decode", batch, rows=batch, context_tokens=context, seconds=seconds)


def _prefill(model: Model, config: EngineBenchConfig, tokens: int) -> Run:
    cache, tables = _filled_cache(model, config, 1, tokens)
    requests = torch.zeros(tokens, dtype=torch.int)
    step = _batch(model.shape, config, tables, torch.arange(tokens), requests)
    seconds = _repeat(lambda: model.forward(step, cache), config.seconds)
    return Run("prefill", 1, rows=tokens, context_tokens=tokens, seconds=seconds)


def _filled_cache(
    model: Model, config: EngineBenchConfig, batch: int, context: int
) -> tuple[KVCache, Tensor]:
    """Random keys and values: memory that nobody wrote is one page of zeros, and far faster."""
    blocks_each = -(-context // config.block_size)
    cache = KVCache.allocate(model.shape, batch * blocks_each, config.block_size)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache, torch.randperm(batch * blocks_each).view(batch, blocks_each).int()


def _batch(
    shape: ModelShape,
    config: EngineBenchConfig,
    tables: Tensor,
    positions: Tensor,
    requests: Tensor,
) -> Batch:
    """A row for each position; logits of each request's last one."""
    size = config.block_size
    slots = tables[requests, positions // size] * size + positions % size
    last_rows = torch.arange(len(requests))[-len(tables) :]
    return Batch(
        token_ids=torch.randint(shape.vocab_size, (len(positions),)).int(),
        positions=positions.int(),
        slot_mapping=slots.int(),
        request_index=requests.int(),
        block_tables=tables,
        selected=last_rows.int(),
    )


def _result(run: Run, cost: StepCost, limits: Limits) -> dict[str, object]:
    bound_ms = 1e3 * max(
        cost.read_bytes(run) / (limits.read_gb_per_s * 1e9),
        cost.flop(run) / (limits.fp32_gflop_per_s * 1e9),
    )
    fastest_ms, median_ms = 1e3 * min(run.seconds), 1e3 * statistics.median(run.seconds)
    return {
        "kind": run.kind,
        "batch": run.batch,
        "context_tokens": run.context_tokens,
        "ms_per_step_min": round(fastest_ms, 2),
        "ms_per_step_median": round(median_ms, 2),
        "tokens_per_s": round(1e3 * run.rows / median_ms, 1),
        "bound_ms": round(bound_ms, 2),
        "share_of_bound": round(bound_ms / fastest_ms, 2),
    }


def _repeat(function: Callable[[], object], min_seconds: float) -> list[float]:
    function()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < min_seconds:
        seconds.append(_timed(function))
    return seconds


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
