"""The command line of each process of a launch, from the service's own config."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Iterator, Sequence

from homing.coordinator.config import CoordinatorConfig
from homing.engine.config import EngineConfig
from homing.frontend.config import FrontendConfig
from homing.launch.config import LaunchConfig
from homing.launch.family import Command

# Streams under way may end for so long after a signal.
DRAIN_S = 3.0
# Seconds from SIGTERM to SIGKILL. Together less than the 10 s in which no process may be left.
FRONTEND_STOP_S = DRAIN_S + 2.0
ENGINE_STOP_S = 3.0
COORDINATOR_STOP_S = 1.0

POSITIONAL = {"model"}
"""Fields that stand on a command line without their name."""


def coordinator_command(config: LaunchConfig, address: str, lifeline_fd: int) -> Command:
    """The process that binds `address`."""
    coordinator = CoordinatorConfig(
        bind=address,
        keys=config.keys,
        policy=config.routing_policy,
        alpha=config.routing_alpha,
        routing_load=config.routing_load,
        prefix_ttl_s=config.prefix_ttl_s,
        max_queued_requests=config.max_queued_requests,
        lifeline_fd=lifeline_fd,
        verbose=config.verbose,
    )
    return Command(
        name="coordinator",
        argv=python_argv("homing.coordinator", coordinator),
        stop_timeout_s=COORDINATOR_STOP_S,
        pass_fds=(lifeline_fd,),
    )


def engine_commands(config: LaunchConfig, address: str, lifeline_fd: int) -> list[Command]:
    """One process a rank. A rank that is started again keeps its number."""
    first = EngineConfig(
        model=config.model,
        coordinator=address,
        keys=config.keys,
        rank=0,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        kv_cache_gb=config.kv_cache_gb,
        block_size=config.block_size,
        kv_events=config.kv_events,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_caching_eviction_policy=config.prefix_caching_eviction_policy,
        preemption=config.preemption,
        enable_chunked_prefill=config.enable_chunked_prefill,
        attention_backend=config.attention_backend,
        sampling_backend=config.sampling_backend,
        num_cuda_graphs=config.num_cuda_graphs,
        cuda_graph_max_requests=config.cuda_graph_max_requests,
        batch_invariant=config.batch_invariant,
        max_batch_requests=config.max_batch_requests,
        max_step_tokens=config.max_step_tokens,
        num_threads=config.engine_threads,
        served_model_name=config.served_model_name,
        join_timeout_s=config.start_timeout_s,
        lifeline_fd=lifeline_fd,
        verbose=config.verbose,
    )
    engines = [dataclasses.replace(first, rank=n) for n in range(config.data_parallel_size)]
    return [
        Command(
            name=f"engine-{engine.rank}",
            argv=python_argv("homing.engine", engine),
            stop_timeout_s=ENGINE_STOP_S,
            pass_fds=(lifeline_fd,),
        )
        for engine in engines
    ]


def frontend_commands(
    config: LaunchConfig, address: str, listeners: Sequence[socket.socket], lifeline_fd: int
) -> list[Command]:
    """One process a listening socket."""
    first = FrontendConfig(
        coordinator=address,
        keys=config.keys,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        api_key=config.api_key,
        api_key_file=config.api_key_file,
        admin_api_key=config.admin_api_key,
        allowed_origins=config.allowed_origins,
        certfile=config.certfile,
        keyfile=config.keyfile,
        join_timeout_s=config.start_timeout_s,
        drain_s=DRAIN_S,
        lifeline_fd=lifeline_fd,
        verbose=config.verbose,
    )
    return [
        Command(
            name=f"frontend-{replica}",
            argv=python_argv("homing.frontend", dataclasses.replace(first, fd=listener.fileno())),
            stop_timeout_s=FRONTEND_STOP_S,
            pass_fds=(listener.fileno(), lifeline_fd),
        )
        for replica, listener in enumerate(listeners)
    ]


def python_argv(
    module: str, config: CoordinatorConfig | EngineConfig | FrontendConfig
) -> list[str]:
    """`python -m module`, easy to find in ps, and a flag for each field that is not the default."""
    return [sys.executable, "-m", module, *_flags(config)]


def _flags(config: CoordinatorConfig | EngineConfig | FrontendConfig) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
            continue
        if field.name not in POSITIONAL:
            yield f"--{flag}"
        yield from map(str, value) if isinstance(value, tuple) else [str(value)]
