"""What an engine's settings mean for a given model, or why they cannot work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from homing.engine.block_pool import EvictionPolicy
from homing.engine.config import EngineConfig
from homing.engine.devices import free_memory
from homing.engine.kv_cache import block_bytes
from homing.engine.models import ModelShape
from homing.errors import ConfigError

GIB = 2**30
DEFAULT_KV_CACHE_GB = 4.0
DEFAULT_KV_CACHE_SHARE = 0.15
"""Of the machine's memory: two engines and their weights then leave it more than half."""
DEFAULT_KV_CACHE_GPU_SHARE = 0.85
"""Of the memory of a GPU that is free once it holds the weights; activations need some, too."""
DEFAULT_KV_CACHE_BATCHES = 4
"""A cache that nobody sized holds no more than so many full batches of longest requests."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What the engine's core works within. Made by `engine_limits`."""

    num_blocks: int
    """Blocks of the KV cache, the scratch block included."""
    block_size: int
    """Tokens of a block."""
    max_context_tokens: int
    """Tokens of one request, answer included."""
    max_batch_requests: int
    max_step_tokens: int
    max_queued_requests: int
    prefix_caching: bool = True
    eviction: EvictionPolicy = "lru"
    chunked_prefill: bool = True
    preemption: Literal["recompute", "offload"] = "recompute"


def engine_limits(config: EngineConfig, shape: ModelShape) -> EngineLimits:
    """Raises ConfigError, in one line, for settings that cannot work."""
    for name in ("block_size", "max_batch_requests", "max_step_tokens", "max_queued_requests"):
        if getattr(config, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {getattr(config, name)}; it must be at least 1")
    if config.max_step_tokens < config.max_batch_requests:
        raise ConfigError(
            f"--max-step-tokens {config.max_step_tokens} is less than --max-batch-requests "
            f"{config.max_batch_requests}: each request of a batch takes at least one token a step"
        )
    max_context_tokens = _max_context_tokens(config, shape)
    if not config.enable_chunked_prefill and config.max_step_tokens < max_context_tokens:
        raise ConfigError(
            f"without chunked prefill a prompt is read in one step: --max-step-tokens is "
            f"{config.max_step_tokens:,}, a request may have {max_context_tokens:,} tokens; raise "
            "it, or lower --max-model-len"
        )
    return EngineLimits(
        num_blocks=_num_blocks(config, shape, max_context_tokens),
        block_size=config.block_size,
        max_context_tokens=max_context_tokens,
        max_batch_requests=config.max_batch_requests,
        max_step_tokens=config.max_step_tokens,
        max_queued_requests=config.max_queued_requests,
        prefix_caching=config.enable_prefix_caching,
        eviction=config.prefix_caching_eviction_policy,
        chunked_prefill=config.enable_chunked_prefill,
        preemption=config.preemption,
    )


def _max_context_tokens(config: EngineConfig, shape: ModelShape) -> int:
    asked = config.max_model_len
    if asked is None:
        return shape.max_context_tokens
    if not 1 < asked <= shape.max_context_tokens:
        raise ConfigError(
            f"--max-model-len is {asked:,}; the model's context is "
            f"{shape.max_context_tokens:,} tokens"
        )
    return asked


def _num_blocks(config: EngineConfig, shape: ModelShape, max_context_tokens: int) -> int:
    bytes_per_block = block_bytes(shape, config.block_size)
    blocks_per_request = -(-max_context_tokens // config.block_size)
    place, memory_gb, default_gb = _memory(shape)
    cache_gb = config.kv_cache_gb
    if cache_gb is None:
        most = DEFAULT_KV_CACHE_BATCHES * config.max_batch_requests * blocks_per_request + 1
        cache_gb = min(default_gb, most * bytes_per_block / GIB)
    if not 0 < cache_gb < memory_gb:
        raise ConfigError(f"--kv-cache-gb is {cache_gb:g}; {place} has {memory_gb:.1f} GiB")
    num_blocks = int(cache_gb * GIB) // bytes_per_block
    needed = blocks_per_request + 1  # and the scratch block
    if num_blocks < needed:
        num_tokens = max(0, num_blocks - 1) * config.block_size
        raise ConfigError(
            f"a KV cache of {cache_gb:.3g} GiB holds {num_tokens:,} tokens; one request may have "
            f"{max_context_tokens:,}: raise --kv-cache-gb to "
            f"{needed * bytes_per_block / GIB + 0.01:.2f} or lower --max-model-len"
        )
    return num_blocks


def _memory(shape: ModelShape) -> tuple[str, float, float]:
    """Where a cache would be, its memory, and how much of that a cache may take unless told, in
    GiB."""
    if shape.device.type == "cpu":
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return (
            "the machine",
            memory_gb,
            min(DEFAULT_KV_CACHE_GB, DEFAULT_KV_CACHE_SHARE * memory_gb),
        )
    memory_gb = free_memory(shape.device) / GIB
    return f"free {shape.device}", memory_gb, DEFAULT_KV_CACHE_GPU_SHARE * memory_gb
