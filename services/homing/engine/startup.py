"""From a process's settings to a loaded engine."""

from __future__ import annotations

import logging

import torch

from homing.engine.config import EngineConfig
from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.kv_journal import KvJournal
from homing.engine.limits import engine_limits
from homing.engine.parts import EngineParts
from homing.engine.self_check import check_batch_invariance
from homing.engine.structured.compiler import GrammarCompiler
from homing.engine.weights import default_cache_dir, load_model, resolve_model
from homing.tokenizer import Tokenizer
from homing.wire import ModelCard

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig, parts: EngineParts | None = None) -> tuple[Engine, ModelCard]:
    """Load model, tokenizer and KV cache; `parts` replace the engine's own. Raises ConfigError, in
    one line, when they cannot work."""
    torch.set_num_threads(config.threads)
    cache_dir = default_cache_dir(config.environ)
    files = resolve_model(config.model, cache_dir=cache_dir, on_progress=log.info)
    tokenizer = Tokenizer.from_dir(files.directory)
    model = load_model(
        files,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        backend=config.attention_backend,
        num_threads=config.threads,
        cache_dir=cache_dir,
        on_progress=log.info,
    )
    if config.batch_invariant:
        check_batch_invariance(model)
    shape = model.shape
    limits = engine_limits(config, shape)
    cache = KVCache.allocate(shape, limits.num_blocks, limits.block_size)
    name = config.served_model_name or files.name
    log.info(
        "loaded",
        extra={
            "model": name,
            "dtype": str(shape.dtype),
            "quantization": config.quantization,
            "kv_cache_dtype": str(shape.cache_dtype),
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
