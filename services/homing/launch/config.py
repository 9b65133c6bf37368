"""What `homing serve` can be told: the command line is derived from this class."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from homing.coordinator.config import CoordinatorConfig
from homing.engine.config import EngineConfig
from homing.errors import ConfigError


@dataclass(frozen=True)
class LaunchConfig:
    """Serve a model over HTTP: one coordinator, engine ranks and frontends, kept running."""

    model: Annotated[Positional[str | None], arg(metavar="[MODEL]")] = None
    """A .gguf file or a Hugging Face directory. Without it: SmolLM2-135M-Instruct, the demo."""

    host: str = "127.0.0.1"
    """Address to serve HTTP on. 0.0.0.0 admits other machines: then set --api-key-file."""

    port: int = 5000
    """TCP port to serve HTTP on. 0 picks a free one, which the ready line names."""

    coordinator_bind: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Address like tcp://0.0.0.0:7000, for engines and clients elsewhere. Without it: none."""

    keys: Annotated[Path | None, arg(metavar="DIR")] = None
    """Keys of `homing keygen`. An address that other machines reach needs them."""

    data_parallel_size: int = 1
    """Engine ranks. Each holds the whole model and a KV cache of its own."""

    frontend_replicas: int = 2
    """HTTP processes behind the one port. Each tokenizes and streams on a core of its own."""

    served_model_name: Annotated[str | None, arg(metavar="NAME")] = None
    """Name that clients ask for. Without it: the model's own."""

    tokenizer: Annotated[str | None, arg(metavar="DIR")] = None
    """Directory with the tokenizer.json that frontends use. Without it: the model's own."""

    chat_template: Annotated[str | None, arg(metavar="FILE")] = None
    """File with a Jinja chat template. Without it: the model's own."""

    tool_call_parser: Annotated[str | None, arg(metavar="NAME")] = None
    """How tool calls look: hermes, llama3_json, mistral, qwen3_coder, none. Else: by template."""

    reasoning_parser: Annotated[str | None, arg(metavar="NAME")] = None
    """How thoughts look: qwen3, deepseek_r1, magistral, seed_oss, none. Else: by template."""

    api_key: Annotated[tuple[str, ...], arg(metavar="KEY ...")] = ()
    """Keys, of which clients must give one. Also $HOMING_API_KEY, which nobody sees in ps."""

    api_key_file: Annotated[str | None, arg(metavar="FILE")] = None
    """File with a key on each line."""

    admin_api_key: Annotated[str | None, arg(metavar="KEY")] = None
    """Key for control routes, else $HOMING_ADMIN_API_KEY. Without it: from this machine only."""

    allowed_origins: Annotated[tuple[str, ...], arg(metavar="ORIGIN ...")] = ()
    """Web pages that may use this server, such as https://app.example.org. * admits any."""

    certfile: Annotated[str | None, arg(metavar="FILE")] = None
    """File with a certificate chain, PEM: serve HTTPS."""

    keyfile: Annotated[str | None, arg(metavar="FILE")] = None
    """File with the certificate's private key."""

    dtype: Annotated[Literal["bf16", "fp16", "fp32"] | None, arg(metavar="NAME")] = None
    """Type of weights and KV cache: bf16, fp16 or fp32. Without it: bf16, the fastest on a CPU."""

    quantization: Annotated[Literal["int8", "int4", "fp8"] | None, arg(metavar="NAME")] = None
    """Round the weights to int8, int4 or fp8 as they are loaded: less memory, mostly faster."""

    kv_cache_dtype: Annotated[Literal["auto", "bf16", "int8", "fp8"], arg(metavar="NAME")] = "auto"
    """Type of keys and values: auto (that of --dtype), bf16, int8 or fp8. In one byte each, about
    twice as many fit."""

    device: Annotated[str, arg(metavar="NAME")] = EngineConfig.device
    """Where to compute: cpu, cuda, cuda:N or auto, CUDA where there is a GPU. Ranks share out the
    GPUs."""

    max_model_len: Annotated[
        int | None, arg(metavar="TOKENS", aliases=("--max-sequence-length",))
    ] = None
    """Most tokens of a prompt and its answer together. Without it: the model's context length."""

    kv_cache_gb: Annotated[float | None, arg(metavar="GB", aliases=("--buffer-size-gb",))] = None
    """Memory of each rank's KV cache in GB. More holds more requests and more cached prefixes."""

    block_size: Annotated[int, arg(aliases=("--block-size-tokens",))] = EngineConfig.block_size
    """Tokens of a KV block, the unit of prefix caching: smaller matches more, and costs more."""

    kv_events: bool = False
    """Ranks tell the coordinator what their caches hold, so that it need not guess."""

    enable_prefix_caching: bool = True
    """Keep KV blocks for requests that begin alike. Without it each computes all of its prompt."""

    prefix_caching_eviction_policy: Literal["lru", "ref_zero"] = "lru"
    """When a kept block goes: when its memory is needed, or when no request has it any more."""

    enable_chunked_prefill: bool = True
    """Read long prompts in several steps. Without it --max-step-tokens must hold a whole one."""

    preemption: Literal["recompute", "offload"] = "recompute"
    """Keys and values of a request that has to wait again: given up, or copied out and back."""

    attention_backend: Annotated[
        Literal["cpu", "torch", "flashinfer"] | None, arg(metavar="NAME")
    ] = None
    """What computes: cpu, our C kernels; flashinfer, on CUDA; or torch, the slow reference. Without
    it: the fastest that can."""

    sampling_backend: Annotated[Literal["torch", "flashinfer"] | None, arg(metavar="NAME")] = None
    """What chooses tokens: torch, on the CPU, or flashinfer, on CUDA. Without it: what can."""

    num_cuda_graphs: int = EngineConfig.num_cuda_graphs
    """Batch sizes whose decode steps are CUDA graphs: the largest, half of it, and so on."""

    cuda_graph_max_requests: Annotated[int | None, arg(metavar="NUM")] = None
    """The largest batch with a CUDA graph. Without it: --max-batch-requests."""

    batch_invariant: bool = False
    """Check at the start that results do not depend on the batch; refuse to start if they do."""

    max_batch_requests: Annotated[int, arg(aliases=("--max-requests",))] = (
        EngineConfig.max_batch_requests
    )
    """Most requests in one step of a rank; more wait. More: more tokens/s in all, fewer each."""

    max_step_tokens: Annotated[int, arg(aliases=("--max-tokens",))] = EngineConfig.max_step_tokens
    """Most tokens in one step of a rank. More: prompts start sooner. Fewer: smoother streams."""

    num_threads: Annotated[int | None, arg(metavar="NUM")] = None
    """CPU threads of each rank. Without it: the cores of this machine divided by the ranks."""

    routing_policy: Annotated[str, arg(metavar="NAME")] = CoordinatorConfig.policy
    """How a rank is picked: prefix_affinity, load_balanced, round_robin, and others."""

    routing_alpha: float = CoordinatorConfig.alpha
    """Weight of load against cached prefix. 0: prefix alone; at 1 one request can outweigh it."""

    routing_load: Literal["requests", "tokens"] = CoordinatorConfig.routing_load
    """What counts as a rank's load: requests, or the tokens they still need. Tokens suit prompts
    of mixed lengths."""

    prefix_ttl_s: float = CoordinatorConfig.prefix_ttl_s
    """Seconds after which the coordinator forgets a prefix that no request has repeated."""

    max_queued_requests: int = CoordinatorConfig.max_queued_requests
    """Requests that a rank may have, waiting ones too. Beyond: an error with Retry-After."""

    start_timeout_s: float = 900.0
    """Seconds to wait for the fleet to serve. The first start on a GGUF file converts it."""

    verbose: bool = False
    """Log debug messages too."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; the least is 1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be from 0 to 65535")

    @property
    def engine_threads(self) -> int:
        """More threads than cores slow every rank down: they wait for one another."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // self.data_parallel_size)


_COUNTS = (
    "data_parallel_size",
    "frontend_replicas",
    "block_size",
    "max_model_len",
    "max_batch_requests",
    "max_step_tokens",
    "max_queued_requests",
    "num_threads",
)
