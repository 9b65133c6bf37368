"""What `homing serve` can be told: the command line is derived from this class."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from homing.errors import ConfigError


@dataclass(frozen=True)
class LaunchConfig:
    """Serve a model over HTTP: one coordinator, engine ranks and frontends, kept running."""

    model: Annotated[Positional[str | None], arg(metavar="[MODEL]")] = None
    """A .gguf file or a Hugging Face directory. Without it: SmolLM2-135M-Instruct, the demo."""

    host: str = "127.0.0.1"
    """Address to serve HTTP on. 0.0.0.0 admits other machines, and asks none of them for a key."""

    port: int = 5000
    """TCP port to serve HTTP on. 0 picks a free one, which the ready line names."""

    data_parallel_size: int = 1
    """Engine ranks. Each holds the whole model and a KV cache of its own."""

    frontend_replicas: int = 2
    """HTTP processes behind the one port. Each tokenizes and streams on a core of its own."""

    served_model_name: Annotated[str | None, arg(metavar="NAME")] = None
    """Name that clients ask for. Without it: the model's own."""

    tokenizer: Annotated[str | None, arg(metavar="DIR")] = None
    """Directory with the tokenizer.json that frontends use. Without it: the model's own."""

    dtype: Annotated[Literal["bf16", "fp16", "fp32"] | None, arg(metavar="NAME")] = None
    """Type of weights and KV cache: bf16, fp16 or fp32. Without it: bf16, the fastest on a CPU."""

    max_model_len: Annotated[int | None, arg(metavar="TOKENS")] = None
    """Most tokens of a prompt and its answer together. Without it: the model's context length."""

    kv_cache_gb: Annotated[float | None, arg(metavar="GB")] = None
    """Memory of each rank's KV cache in GB. More holds more requests and more cached prefixes."""

    block_size: int = 16
    """Tokens of a KV block, the unit of prefix caching: smaller matches more, and costs more."""

    max_batch_requests: Annotated[int | None, arg(metavar="NUM")] = None
    """Most requests that a rank computes in one step; others wait. Without it: the engine's own."""

    max_step_tokens: Annotated[int | None, arg(metavar="TOKENS")] = None
    """Most tokens in one step. Fewer: smoother streams; more: prompts start sooner."""

    num_threads: Annotated[int | None, arg(metavar="NUM")] = None
    """CPU threads of each rank. Without it: the cores of this machine divided by the ranks."""

    routing_policy: Literal["prefix_affinity", "load_balanced", "round_robin"] = "prefix_affinity"
    """How the coordinator picks a rank: by cached prefix and load, by load alone, or in turn."""

    routing_alpha: float = 0.5
    """Weight of load against prefix in prefix_affinity. 0 looks at prefixes alone."""

    prefix_ttl_s: float = 300.0
    """Seconds after which the coordinator forgets a prefix that no request has used."""

    max_queued_requests: Annotated[int | None, arg(metavar="NUM")] = None
    """Requests of the whole fleet beyond which clients get a 503 with Retry-After."""

    start_timeout_s: float = 900.0
    """Seconds to wait for the fleet to serve. The first start on a GGUF file converts it."""

    verbose: bool = False
    """Log debug messages too."""

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "frontend_replicas", "block_size"):
            self._require(name, at_least=1)
        for name in ("max_model_len", "max_batch_requests", "max_step_tokens", "num_threads"):
            self._require(name, at_least=1)
        self._require("max_queued_requests", at_least=1)
        self._require("port", at_least=0)
        if self.port > 65535:
            raise ConfigError(f"--port is {self.port}; the highest is 65535")

    def _require(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < at_least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; the least is {at_least}")

    @property
    def engine_threads(self) -> int:
        """More threads than cores slow every rank down: they wait for one another."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // self.data_parallel_size)


def engine_environment(num_threads: int) -> dict[str, str]:
    """The launcher's own environment, with OpenMP set up for an engine unless the user has."""
    openmp = {
        # Threads that wait must not spin: on a busy machine they take the core from the one
        # they wait for, and two ranks slow each other down several times over.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(num_threads),
    }
    return openmp | os.environ
