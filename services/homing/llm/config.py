"""How the Python API is set up: the engines, and HTTP service beside them."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.routing import POLICY_NAMES
from homing.engine import config as engine
from homing.engine.config import AttentionBackend, SamplingBackend
from homing.frontend.parsers.choose import TOOL_FORMATS
from homing.frontend.parsers.reasoning import REASONING_FORMATS
from homing.launch.config import LaunchConfig

DType = Literal["bf16", "fp16", "fp32"]
Quantization = Literal["int8", "int4", "fp8"]
KVCacheDType = Literal["auto", "bf16", "int8", "fp8"]
EvictionPolicy = Literal["lru", "ref_zero"]
Preemption = Literal["recompute", "offload"]
KVCacheManagement = Literal["persist", "offload", "discard"]

_CHOICES: dict[str, Sequence[str]] = {
    "dtype": get_args(DType),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDType),
    "prefix_caching_eviction_policy": get_args(EvictionPolicy),
    "preemption": get_args(Preemption),
    "attention_backend": get_args(AttentionBackend),
    "sampling_backend": get_args(SamplingBackend),
    "kv_cache_management_mode": get_args(KVCacheManagement),
    "routing_policy": POLICY_NAMES,
}

ENGINE_FIELDS = {  # field here -> field of an engine's own config, and of a launch's
    "max_sequence_length": "max_model_len",
    "buffer_size_gb": "kv_cache_gb",
    "block_size_tokens": "block_size",
    "max_requests": "max_batch_requests",
    "max_tokens": "max_step_tokens",
} | {
    name: name
    for name in (
        *("enable_prefix_caching", "prefix_caching_eviction_policy", "enable_chunked_prefill"),
        "preemption",
        *("attention_backend", "batch_invariant", "dtype", "quantization", "kv_cache_dtype"),
        *("device", "sampling_backend", "num_cuda_graphs", "cuda_graph_max_requests"),
        "num_threads",
    )
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine, or each of several alike. Bad values raise `ValueError`."""

    max_sequence_length: int | None = None
    """Most tokens of a prompt and its answer together. None: the model's context length. Less lets
    a small `buffer_size_gb` do."""

    buffer_size_gb: float | None = None
    """Memory of an engine's KV cache in GiB. More holds more requests and more cached prefixes.
    None: 4, or 15 % of the machine's memory, or what four full batches take, whichever is least."""

    block_size_tokens: int = engine.EngineConfig.block_size
    """Tokens of a KV block, the grain in which prefixes are shared: smaller matches more, and costs
    more."""

    enable_prefix_caching: bool = True
    """Keep the KV blocks of prompts and answers for requests that begin alike. Without it each
    computes all of its prompt; then `routing_policy` should be load_balanced, too."""

    prefix_caching_eviction_policy: EvictionPolicy = "lru"
    """When a kept block goes. lru: when its memory is needed, the one not used for longest first.
    ref_zero: when the last request that has it ends, so only what runs side by side shares it."""

    enable_chunked_prefill: bool = True
    """Read a long prompt in several steps, beside the answers of others. Without it each is read in
    one step, which `max_tokens` must have room for, and answers wait meanwhile; only prompts whose
    log-probabilities are asked for are still read in pieces."""

    preemption: Preemption = "recompute"
    """What becomes of the keys and values of a request that has to wait again. recompute: they are
    given up. offload: copied out of the cache, and back later: up to its size in memory more."""

    attention_backend: AttentionBackend | None = None
    """What computes. cpu: C kernels, compiled at the first start, or an error where they cannot be.
    torch: the reference, several times slower. flashinfer: for CUDA. None: what is fastest of what
    can be had."""

    sampling_backend: SamplingBackend | None = None
    """What chooses tokens. torch: on the CPU. flashinfer: on CUDA, where the logits are. None:
    flashinfer where it can be."""

    device: str = engine.EngineConfig.device
    """Where to compute: cpu, cuda, cuda:N or auto, CUDA where there is a GPU. Engines share out the
    GPUs of a machine. Not yet verified on hardware."""

    num_cuda_graphs: int = engine.EngineConfig.num_cuda_graphs
    """Batch sizes of decodes that are captured as CUDA graphs, with flashinfer: the largest, half
    of it, and so on. 0: none, and decode steps of small models wait for the CPU."""

    cuda_graph_max_requests: int | None = None
    """The largest batch with a CUDA graph. Larger ones run as they are. Less saves memory of the
    GPU. None: `max_requests`."""

    batch_invariant: bool = False
    """Check at the start that a request has the same tokens and log-probabilities, to the bit,
    alone and in a batch, and refuse to start if not. Takes about ten steps."""

    kv_cache_management_mode: KVCacheManagement = "persist"
    """What `suspend` does with the KV cache when it is not told: see there."""

    max_requests: int = engine.EngineConfig.max_batch_requests
    """Requests that run at a time; more wait. A larger batch answers more in all, each more
    slowly."""

    max_tokens: int = engine.EngineConfig.max_step_tokens
    """Tokens computed in one step. More: prompts are read a little faster. Fewer: answers flow more
    evenly beside them."""

    dtype: DType | None = None
    """Type of weights and KV cache: bf16, fp16 or fp32. None: bf16, or a built model's own."""

    quantization: Quantization | None = None
    """Round the weights to int8, int4 or fp8, when they are loaded and when they are updated: less
    memory, mostly faster, log-probabilities a little off. None: keep them."""

    kv_cache_dtype: KVCacheDType = "auto"
    """Type of keys and values: bf16, int8 or fp8; one byte holds twice the tokens of two. auto:
    that of `dtype`."""

    num_threads: int | None = None
    """CPU threads of an engine. None: the cores that this process may use, divided by the engines
    on this machine."""

    routing_policy: str = CoordinatorConfig.policy
    """How the coordinator picks an engine: prefix_affinity, load_balanced, round_robin and others.
    Without a coordinator it has no effect."""

    routing_alpha: float = CoordinatorConfig.alpha
    """Weight of load against cached prefix in prefix_affinity. 0: the prefix alone counts; at 1 one
    request more can outweigh a whole one."""

    prefix_ttl_s: float = CoordinatorConfig.prefix_ttl_s
    """Seconds after which the coordinator forgets a prefix that no request has repeated."""

    keys: str | Path | None = None
    """Directory with the keys of `homing keygen`, the same for every rank: by them the ranks of a
    torchrun job on several machines know each other. None: all ranks are on one machine."""

    start_timeout_s: float = 900.0
    """Seconds to wait until every engine serves. The first start on a GGUF file converts it."""

    def of_engine(self, model: str | None) -> engine.EngineConfig:
        """The settings of an engine in this process, which needs no coordinator."""
        return engine.EngineConfig(model=model, coordinator="", **self._of_any_engine)

    def of_launch(self, model: str | None, num_engines: int) -> LaunchConfig:
        """The settings of engine processes and their coordinator."""
        return LaunchConfig(
            model=model,
            data_parallel_size=num_engines,
            routing_policy=self.routing_policy,
            routing_alpha=self.routing_alpha,
            prefix_ttl_s=self.prefix_ttl_s,
            keys=None if self.keys is None else Path(self.keys),
            start_timeout_s=self.start_timeout_s,
            **self._of_any_engine,
        )

    @property
    def _of_any_engine(self) -> dict[str, Any]:
        return {theirs: getattr(self, ours) for ours, theirs in ENGINE_FIELDS.items()}

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "max_requests", "max_tokens"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_threads", self.num_threads, 1)
        _at_least("num_cuda_graphs", self.num_cuda_graphs, 0)
        _at_least("cuda_graph_max_requests", self.cuda_graph_max_requests, 1)
        _at_least("max_sequence_length", self.max_sequence_length, 2)
        for name in ("routing_alpha", "prefix_ttl_s", "start_timeout_s"):
            _at_least(name, getattr(self, name), 0.0)
        if self.buffer_size_gb is not None and not self.buffer_size_gb > 0:
            raise ValueError(f"buffer_size_gb is {self.buffer_size_gb}; it must be above 0")
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, less than max_requests, {self.max_requests}: "
                "each request of a batch takes at least one token a step"
            )
        for name, choices in _CHOICES.items():
            _one_of(name, getattr(self, name), choices)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """HTTP service by the engines of an `AsyncLLM` or `LLM`. Bad values raise `ValueError`."""

    host: str = "127.0.0.1"
    """Address to serve on. 0.0.0.0 admits other machines, and asks none of them for a key."""

    port: int = 5000
    """TCP port to serve on; 0 takes a free one, which `serve` returns."""

    parsers: Sequence[str] = ()
    """How the model writes tool calls (hermes, llama3_json, mistral, qwen3_coder) and thoughts
    (qwen3, deepseek_r1, magistral, seed_oss): one of each at most. What is not named is told from
    the chat template."""

    verbose: bool = False
    """Have the frontends log more."""

    frontend_replicas: int = 4
    """HTTP processes behind the one port. Each tokenizes and streams on a core of its own."""

    def __post_init__(self) -> None:
        _at_least("frontend_replicas", self.frontend_replicas, 1)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if isinstance(self.parsers, str):
            raise ValueError(f"parsers is {self.parsers!r}; it must be a list of names")
        for name in self.parsers:
            if name not in (*TOOL_FORMATS, *REASONING_FORMATS):
                names = ", ".join((*TOOL_FORMATS, *REASONING_FORMATS))
                raise ValueError(f"parsers has {name!r}; there are {names}")
        for formats in (TOOL_FORMATS, REASONING_FORMATS):
            if sum(name in formats for name in self.parsers) > 1:
                raise ValueError(f"parsers is {list(self.parsers)}: two of one kind")

    @property
    def tool_call_parser(self) -> str | None:
        return next((name for name in self.parsers if name in TOOL_FORMATS), None)

    @property
    def reasoning_parser(self) -> str | None:
        return next((name for name in self.parsers if name in REASONING_FORMATS), None)


def process_environ() -> MutableMapping[str, str]:
    """The process's environment."""
    return os.environ


def _one_of(name: str, value: str | None, names: Sequence[str]) -> None:
    if value is not None and value not in names:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(names)}")


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
