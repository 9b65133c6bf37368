"""From a process's settings to a loaded engine."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from homing.engine.attention.pages import padded
from homing.engine.config import EngineConfig, SamplingBackend
from homing.engine.devices import Machine, choose_device, choose_sampling
from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.kv_journal import KvJournal
from homing.engine.limits import engine_limits
from homing.engine.models import Model
from homing.engine.models.graphed import GraphedDecoder, graph_sizes, no_rows
from homing.engine.parts import EngineParts
from homing.engine.sampling import Sampler
from homing.engine.sampling.on_device import FlashInferSampler
from homing.engine.self_check import check_batch_invariance
from homing.engine.structured.compiler import GrammarCompiler
from homing.engine.weights import load_model, resolve_model
from homing.errors import ConfigError
from homing.native import default_cache_dir
from homing.tokenizer import Tokenizer
from homing.wire import ModelCard

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig, parts: EngineParts | None = None) -> tuple[Engine, ModelCard]:
    """Load model, tokenizer and KV cache; `parts` replace the engine's own. Raises ConfigError, in
    one line, when they cannot work."""
    torch.set_num_threads(config.threads)
    cache_dir = default_cache_dir(config.environ)
    machine = Machine.here()
    needs_cpu = bool(
        config.attention_backend == "cpu" or config.quantization or config.batch_invariant
    )
    device = choose_device(config.device, machine, rank=config.rank, needs_cpu=needs_cpu)
    sampling = choose_sampling(config.sampling_backend, device, machine)
    files = resolve_model(config.model, cache_dir=cache_dir, on_progress=log.info)
    tokenizer = Tokenizer.from_dir(files.directory)
    model = load_model(
        files,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        backend=config.attention_backend,
        device=device,
        graph_sizes=graph_sizes_of(config),
        num_threads=config.threads,
        cache_dir=cache_dir,
        on_progress=log.info,
    )
    if config.batch_invariant:
        check_batch_invariance(model)
    shape = model.shape
    limits = engine_limits(config, shape)
    cache = KVCache.allocate(shape, limits.num_blocks, limits.block_size)
    parts = _with_sampler(parts, sampling)
    _warm_up(model, cache, parts.sampler)
    name = config.served_model_name or files.name
    log.info(
        "loaded",
        extra={
            "model": name,
            "dtype": str(shape.dtype),
            "quantization": config.quantization,
            "kv_cache_dtype": str(shape.cache_dtype),
            "device": str(device),
            "threads": config.threads,
            "kv_cache_tokens": (limits.num_blocks - 1) * limits.block_size,
        },
    )
    card = ModelCard(
        name=name,
        tokenizer_dir=str(files.directory.resolve()),
        max_context_tokens=limits.max_context_tokens,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        block_size=limits.block_size,
        dtype=str(shape.dtype).removeprefix("torch."),
    )
    grammars = GrammarCompiler(files.directory, shape.vocab_size, shape.eos_token_ids)
    engine = Engine(model, cache, tokenizer, limits, grammars, parts)
    if config.kv_events:
        engine.block_pool.journal = KvJournal(limits.block_size)
    return engine, card


def _warm_up(model: Model, cache: KVCache, sampler: Sampler) -> None:
    """Have GPU kernels compiled and graphs captured now: a rank that does it amid requests is
    silent for so long that the coordinator takes it for dead."""
    if model.shape.device.type != "cpu":
        log.info("compiling kernels, if they are new")
        model.forward(padded(no_rows(), 1, cache.block_size), cache)
    if isinstance(model, GraphedDecoder):
        log.info("capturing CUDA graphs")
        model.warm_up(cache)
    if isinstance(sampler, FlashInferSampler):
        sampler.warm_up(model.shape)


def graph_sizes_of(config: EngineConfig) -> tuple[int, ...]:
    num_graphs, largest = config.num_cuda_graphs, config.cuda_graph_max_requests
    if num_graphs < 0:
        raise ConfigError(f"--num-cuda-graphs is {num_graphs}; it must be at least 0")
    if largest is not None and largest < 1:
        raise ConfigError(f"--cuda-graph-max-requests is {largest}; it must be at least 1")
    return graph_sizes(num_graphs, largest or config.max_batch_requests)


def _with_sampler(parts: EngineParts | None, backend: SamplingBackend) -> EngineParts:
    """A sampler of the caller's own stays."""
    parts = parts or EngineParts()
    if backend == "flashinfer" and type(parts.sampler) is Sampler:
        return replace(parts, sampler=FlashInferSampler())
    return parts
