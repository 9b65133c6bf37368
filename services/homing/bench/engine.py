"""`homing bench engine`: what one model does in one process, beside what the machine allows.

No server, scheduler or sampling: the bare step. The limits, memory reads and products (in fp32 on a
CPU, in the weights' dtype on CUDA), are measured in the same run, because they move with the
machine's state and its neighbours. The bound
of a step is the longer of reading weights and KV cache once and doing its arithmetic; nothing that
uses these weights can be faster.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import tyro
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.config import AttentionBackend
from homing.engine.devices import Machine, choose_device
from homing.engine.kernels.decoder import CDecoder
from homing.engine.kv_cache import KVCache, block_bytes, write_slots
from homing.engine.models import Model, ModelShape
from homing.engine.models.quantization import Quantization, quantization_of
from homing.engine.weights import load_model, resolve_model
from homing.native import default_cache_dir

MIN_REPEATS = 3
LIMIT_SECONDS = 0.5  # for each of the two limits
LIMIT_SIZES = {"cpu": (2**26, 1536), "cuda": (2**28, 8192)}
"""fp32 numbers to read, which no cache holds, and the width of matrices to multiply."""


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
    """bf16, fp16 or fp32, of weights and KV cache."""
    quantization: str | None = None
    """int8, int4 or fp8: round the weights to it."""
    kv_cache_dtype: str = "auto"
    """bf16, int8 or fp8; auto: that of `dtype`."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: CUDA where there is a GPU."""
    attention_backend: AttentionBackend | None = None
    """What computes; None: the fastest of what can be had."""
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
    gflop_per_s: float

    def best(self, other: Limits) -> Limits:
        return Limits(
            max(self.read_gb_per_s, other.read_gb_per_s),
            max(self.gflop_per_s, other.gflop_per_s),
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
    """What a step must read and compute at least.

    Products of pairs of 16-bit numbers count half: a CPU that has them multiplies twice as many as
    in fp32. Weights of whole numbers are multiplied so, and bf16 where the CPU can.
    """

    shape: ModelShape
    layer_weights: int  # numbers in the matrices of all layers
    head_weights: int
    quantization: Quantization | None = None
    in_pairs: bool = False

    @classmethod
    def of(cls, model: Model, quantization: Quantization | None = None) -> StepCost:
        sizes = {
            name: math.prod(shape)
            for name, shape in model.parameter_shapes.items()
            if len(shape) == 2
        }
        embedding = sizes.pop("model.embed_tokens.weight")
        head = sizes.pop("lm_head.weight", embedding)
        if quantization is not None:
            in_pairs = quantization.layers.is_integer
        else:
            in_pairs = model.shape.dtype == torch.bfloat16 and "bf16" in (kernels(model) or "")
        return cls(model.shape, sum(sizes.values()), head, quantization, in_pairs)

    @property
    def weight_bytes(self) -> int:
        """Of the matrices that a step multiplies with."""
        if self.quantization is None:
            return (self.layer_weights + self.head_weights) * self.shape.dtype.itemsize
        layers = self.layer_weights * self.quantization.layers.bytes_per_weight
        return round(layers + self.head_weights * self.quantization.head.bytes_per_weight)

    def read_bytes(self, run: Run) -> int:
        kv_bytes = run.batch * run.context_tokens * block_bytes(self.shape, block_size=1)
        return self.weight_bytes + kv_bytes

    def flop(self, run: Run) -> int:
        """The head computes one row a request; a prefill row attends to half of the context."""
        products = self.layer_weights * run.rows + self.head_weights * run.batch
        if self.in_pairs:
            products //= 2
        attended = run.context_tokens if run.kind == "decode" else run.context_tokens // 2
        per_token = 2 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim
        return 2 * (products + run.rows * attended * per_token)


def main(argv: Sequence[str] | None = None) -> int:
    config = tyro.cli(EngineBenchConfig, args=argv, prog="homing bench engine")
    print(json.dumps(run(config), indent=2))
    return 0


def run(config: EngineBenchConfig) -> dict[str, object]:
    cache_dir = default_cache_dir(os.environ)
    needs_cpu = config.attention_backend == "cpu" or config.quantization is not None
    device = choose_device(config.device, Machine.here(), needs_cpu=needs_cpu)
    files = resolve_model(config.model, cache_dir=cache_dir)
    model = load_model(
        files,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        backend=config.attention_backend,
        device=device,
        graph_sizes=sorted(set(config.batches)),
        num_threads=config.num_threads,
        cache_dir=cache_dir,
    )
    torch.set_num_threads(config.num_threads)
    limits = measure_limits(model.shape)
    cost = StepCost.of(model, quantization_of(config.quantization))
    decodes = (
        decode(
            model,
            batch=batch,
            context=prompt + config.output_tokens,
            num_steps=config.output_tokens,
            block_size=config.block_size,
        )
        for prompt in config.prompts
        for batch in config.batches
    )
    prefills = (
        prefill(model, tokens=prompt, seconds=config.seconds, block_size=config.block_size)
        for prompt in config.prompts
    )
    runs = [*decodes, *prefills]
    limits = limits.best(measure_limits(model.shape))  # neighbours come and go
    results = [_result(run, cost, limits) for run in runs]
    return {
        "model": files.name,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "device": str(device),
        "num_threads": config.num_threads,
        "backend": type(model).__name__,
        "kernels": kernels(model),
        "limits": asdict(limits),
        "results": results,
    }


def kernels(model: Model) -> str | None:
    """The instructions that our C kernels were compiled for; None where they do not run."""
    return model.instructions if isinstance(model, CDecoder) else None


def measure_limits(shape: ModelShape) -> Limits:
    """Where the model is. With torch's own threads, which `load_model` set to the model's."""
    device = shape.device
    num_numbers, size = LIMIT_SIZES[device.type]
    numbers = torch.ones(num_numbers, device=device)
    read_s = min(_repeat(lambda: numbers.sum(), device, LIMIT_SECONDS))
    left, right = torch.randn(2, size, size, device=device).to(shape.compute_dtype)
    product_s = min(_repeat(lambda: left @ right, device, LIMIT_SECONDS))
    return Limits(
        read_gb_per_s=round(numbers.nbytes / read_s / 1e9, 1),
        gflop_per_s=round(2 * size**3 / product_s / 1e9, 1),
    )


def decode(model: Model, *, batch: int, context: int, num_steps: int, block_size: int) -> Run:
    """`num_steps` steps up to a context of `context` tokens, on random keys and values."""
    cache, tables = _filled_cache(model.shape, batch, context, block_size)
    steps = [
        _batch(model.shape, tables, block_size, torch.full((batch,), position), torch.arange(batch))
        for position in range(context - num_steps, context)
    ]
    model.forward(steps[0], cache)
    device = model.shape.device
    seconds = [_timed(lambda step=step: model.forward(step, cache), device) for step in steps]
    return Run("decode", batch, rows=batch, context_tokens=context, seconds=seconds)


def prefill(model: Model, *, tokens: int, seconds: float, block_size: int) -> Run:
    """One prompt in one step, again and again for `seconds`."""
    cache, tables = _filled_cache(model.shape, 1, tokens, block_size)
    requests = torch.zeros(tokens, dtype=torch.int)
    step = _batch(model.shape, tables, block_size, torch.arange(tokens), requests)
    times = _repeat(lambda: model.forward(step, cache), model.shape.device, seconds)
    return Run("prefill", 1, rows=tokens, context_tokens=tokens, seconds=times)


def _filled_cache(
    shape: ModelShape, batch: int, context: int, block_size: int
) -> tuple[KVCache, Tensor]:
    """Random keys and values: memory that nobody wrote is one page of zeros, and far faster."""
    blocks_each = -(-context // block_size)
    cache = KVCache.allocate(shape, batch * blocks_each, block_size)
    device = shape.device
    slots = torch.arange(batch * blocks_each * block_size, device=device)
    for tensor in (*cache.keys, *cache.values):
        size = (len(slots), shape.num_kv_heads, shape.head_dim)
        write_slots(tensor, torch.randn(size, device=device), slots)
    return cache, torch.randperm(batch * blocks_each).view(batch, blocks_each).int()


def _batch(
    shape: ModelShape, tables: Tensor, block_size: int, positions: Tensor, requests: Tensor
) -> Batch:
    """A row for each position; logits of each request's last one."""
    slots = tables[requests, positions // block_size] * block_size + positions % block_size
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
        cost.flop(run) / (limits.gflop_per_s * 1e9),
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


def _repeat(
    function: Callable[[], object], device: torch.device, min_seconds: float
) -> list[float]:
    function()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < min_seconds:
        seconds.append(_timed(function, device))
    return seconds


def _timed(function: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    started = time.perf_counter()
    function()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
