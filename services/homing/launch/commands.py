"""The command line of each process of a launch."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence

from homing.launch.config import LaunchConfig, engine_environment
from homing.launch.family import Command

# Seconds from SIGTERM to SIGKILL. Together less than the 10 s in which no process may be left.
FRONTEND_STOP_S = 5.0  # streams under way may end
ENGINE_STOP_S = 2.0
COORDINATOR_STOP_S = 1.0


def coordinator_command(config: LaunchConfig, address: str, lifeline_fd: int) -> Command:
    """The process that binds `address`."""
    flags = {
        "bind": address,
        "policy": config.routing_policy,
        "alpha": config.routing_alpha,
        "prefix-ttl-s": config.prefix_ttl_s,
        "max-queued-requests": config.max_queued_requests,
        "verbose": config.verbose,
        "lifeline-fd": lifeline_fd,
    }
    return Command(
        name="coordinator",
        argv=_argv("homing.coordinator", flags),
        stop_timeout_s=COORDINATOR_STOP_S,
        pass_fds=(lifeline_fd,),
    )


def engine_commands(config: LaunchConfig, address: str, lifeline_fd: int) -> list[Command]:
    """One process a rank. A rank that is started again keeps its number."""
    flags = {
        "model": config.model,
        "coordinator": address,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "kv-cache-gb": config.kv_cache_gb,
        "block-size": config.block_size,
        "max-batch-requests": config.max_batch_requests,
        "max-step-tokens": config.max_step_tokens,
        "num-threads": config.engine_threads,
        "served-model-name": config.served_model_name,
        "verbose": config.verbose,
        "lifeline-fd": lifeline_fd,
    }
    return [
        Command(
            name=f"engine-{rank}",
            argv=_argv("homing.engine", {"rank": rank} | flags),
            stop_timeout_s=ENGINE_STOP_S,
            pass_fds=(lifeline_fd,),
            environment=engine_environment(config.engine_threads),
        )
        for rank in range(config.data_parallel_size)
    ]


def frontend_commands(
    config: LaunchConfig, address: str, listeners: Sequence[socket.socket], lifeline_fd: int
) -> list[Command]:
    """One process a listening socket."""
    flags = {
        "coordinator": address,
        "tokenizer": config.tokenizer,
        "verbose": config.verbose,
        "lifeline-fd": lifeline_fd,
    }
    return [
        Command(
            name=f"frontend-{replica}",
            argv=_argv("homing.frontend", {"fd": listener.fileno()} | flags),
            stop_timeout_s=FRONTEND_STOP_S,
            pass_fds=(listener.fileno(), lifeline_fd),
        )
        for replica, listener in enumerate(listeners)
    ]


def _argv(module: str, flags: Mapping[str, object]) -> list[str]:
    """`python -m module` with every flag that has a value: easy to tell apart in ps."""
    argv = [sys.executable, "-m", module]
    for name, value in flags.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None and value is not False:
            argv += [f"--{name}", str(value)]
    return argv
