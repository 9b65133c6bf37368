"""How one engine process is set up. Imports no torch: launchers read this."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from tyro.conf import Positional, arg

AttentionBackend: TypeAlias = Literal["cpu", "torch", "flashinfer"]
SamplingBackend: TypeAlias = Literal["torch", "flashinfer"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: loads a model, joins a coordinator and answers requests."""

    model: Annotated[Positional[str | None], arg(metavar="[MODEL]")] = None
    """A Hugging Face directory or a .gguf file. Default: the demo model, SmolLM2-135M-Instruct."""
    coordinator: str
    """Address of the coordinator, such as tcp://127.0.0.1:5001 or ipc:///run/homing/coordinator."""
    keys: Path | None = None
    """Key file, or its directory, of `homing keygen`, for a coordinator that asks for keys."""
    rank: int | None = None
    """The rank to be in the fleet. Default: the lowest free one."""
    dtype: str | None = None
    """bf16, fp16 or fp32, of weights and KV cache. Default: bf16."""
    quantization: str | None = None
    """int8, int4 or fp8: weights are rounded when they are loaded, and updated. Less memory, and
    faster but for fp8; answers differ a little: docs/precision.md. Default: not rounded."""
    kv_cache_dtype: str = "auto"
    """bf16, int8 or fp8, of keys and values. One byte instead of two holds twice the tokens.
    Default: auto, the same as dtype."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:N or auto, CUDA where there is a GPU. Ranks share out the
    GPUs. Not yet verified on hardware: docs/cuda.md."""
    max_model_len: Annotated[int | None, arg(aliases=("--max-sequence-length",))] = None
    """Most tokens of a request, prompt and answer. Default: the model's context length."""
    kv_cache_gb: Annotated[float | None, arg(aliases=("--buffer-size-gb",))] = None
    """Memory for keys and values, in GiB. Default: 4, or 15 % of the machine's memory, or what four
    full batches of longest requests take, whichever is least; on CUDA 85 % of the GPU's free
    memory in place of the first two."""
    block_size: Annotated[int, arg(aliases=("--block-size-tokens",))] = 16
    """Tokens of a KV block: the grain in which prefixes are shared."""
    kv_events: bool = False
    """Tell the coordinator which prefixes came into the cache and which were evicted, so that it
    need not guess. Worth it where caches are small; costs a message each half second."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of prompts and answers for requests that begin alike. Without it each
    computes all of its prompt; then route by load_balanced, too."""
    prefix_caching_eviction_policy: Literal["lru", "ref_zero"] = "lru"
    """When a kept block goes. lru: when its memory is needed, the one not used for longest first.
    ref_zero: when the last request that has it ends, so only what runs side by side shares it."""
    enable_chunked_prefill: bool = True
    """Read a long prompt in several steps, beside the answers of others. Without it each is read in
    one step, which `max_step_tokens` must have room for, and answers wait meanwhile; only prompts
    whose log-probabilities are asked for are still read in pieces."""
    preemption: Literal["recompute", "offload"] = "recompute"
    """What becomes of the keys and values of a request that has to wait again. recompute: they are
    given up. offload: copied out of the cache, and back later: up to its size in memory more."""
    attention_backend: AttentionBackend | None = None
    """What computes. cpu: C kernels, compiled at the first start, or an error where they cannot be.
    torch: the reference, several times slower. flashinfer: for CUDA. Default: what is fastest of
    what can be had."""
    sampling_backend: SamplingBackend | None = None
    """What chooses tokens. torch: on the CPU. flashinfer: on CUDA, where the logits are. Default:
    flashinfer where it can be."""
    num_cuda_graphs: int = 8
    """Batch sizes of decodes that are captured as CUDA graphs, with flashinfer: the largest, half
    of it, and so on. 0: none, and decode steps of small models wait for the CPU."""
    cuda_graph_max_requests: int | None = None
    """The largest batch with a CUDA graph. Larger ones run as they are. Less saves memory of the
    GPU. Default: `max_batch_requests`."""
    batch_invariant: bool = False
    """Check at the start that a request has the same tokens and log-probabilities, to the bit,
    alone and in a batch, and refuse to start if not. Takes about ten steps."""
    max_batch_requests: Annotated[int, arg(aliases=("--max-requests",))] = 64
    """Requests that run at a time; more wait. Larger: more answers in all, each more slowly."""
    max_step_tokens: Annotated[int, arg(aliases=("--max-tokens",))] = 256
    """Tokens computed in one step. More: prompts are read a little faster. Fewer: answers flow more
    evenly beside them."""
    max_queued_requests: int = 4096
    """Requests that wait; more are refused."""
    num_threads: int | None = None
    """Threads that compute. Default: one for each core that this process may use."""
    served_model_name: str | None = None
    """What clients call the model. Default: its file's name."""
    join_timeout_s: float = 300.0
    """How long to wait for a coordinator that does not answer, before giving up."""
    drain_s: float = 30.0
    """On SIGTERM: how long what is running may go on. What is left then goes on elsewhere. A second
    SIGTERM, or SIGINT, ends that."""
    lifeline_fd: int | None = None
    """A pipe's read end; when it closes, the parent process is gone, and this one stops."""
    verbose: bool = False
    """Log more."""

    @property
    def threads(self) -> int:
        return self.num_threads or len(os.sched_getaffinity(0))

    @property
    def openmp(self) -> dict[str, str]:
        """For the environment, before torch is loaded. Threads that wait must not spin: on a busy
        machine they take the core from the one they wait for."""
        return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(self.threads)}

    @property
    def environ(self) -> MutableMapping[str, str]:
        """The process's environment."""
        return os.environ
