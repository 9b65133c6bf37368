"""The command lines of a launch say to each service exactly what its config is to be."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tyro

from homing.coordinator.config import CoordinatorConfig
from homing.engine.config import EngineConfig
from homing.errors import ConfigError
from homing.frontend.config import FrontendConfig
from homing.launch.commands import (
    COORDINATOR_STOP_S,
    ENGINE_STOP_S,
    FRONTEND_STOP_S,
    coordinator_command,
    engine_commands,
    frontend_commands,
)
from homing.launch.config import LaunchConfig
from homing.launch.family import Command
from homing.llm.config import EngineConfig as LlmConfig

ADDRESS = "ipc:///nowhere/coordinator.sock"
LIFELINE = 9
PASSED_ON_TO_FRONTENDS = [
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "api_key",
    "api_key_file",
    "admin_api_key",
    "allowed_origins",
    "certfile",
    "keyfile",
    "keys",
]
EVERYTHING = LaunchConfig(
    model="/models/some model",
    data_parallel_size=2,
    served_model_name="little",
    tokenizer="/models/tokenizer",
    chat_template="/models/template.jinja",
    tool_call_parser="hermes",
    reasoning_parser="none",
    api_key=("one", "two"),
    api_key_file="/keys",
    admin_api_key="three",
    allowed_origins=("https://a", "https://b"),
    certfile="/certificate",
    keyfile="/key",
    coordinator_bind=ADDRESS,
    keys=Path("/fleet keys"),
    dtype="fp32",
    quantization="int8",
    kv_cache_dtype="fp8",
    max_model_len=512,
    kv_cache_gb=0.5,
    block_size=32,
    kv_events=True,
    enable_prefix_caching=False,
    prefix_caching_eviction_policy="ref_zero",
    preemption="offload",
    enable_chunked_prefill=False,
    attention_backend="flashinfer",
    sampling_backend="flashinfer",
    device="cuda",
    num_cuda_graphs=4,
    cuda_graph_max_requests=6,
    batch_invariant=True,
    max_batch_requests=8,
    max_step_tokens=128,
    num_threads=3,
    routing_policy="round_robin",
    routing_alpha=0.25,
    routing_load="tokens",
    prefix_ttl_s=60.0,
    max_queued_requests=7,
    start_timeout_s=11.0,
    verbose=True,
)


def flags(command: Command, module: str) -> list[str]:
    """The words after `python -m module`."""
    assert list(command.argv[:3]) == [sys.executable, "-m", module]
    return list(command.argv[3:])


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.socket()) for _ in range(2)]


def test_the_coordinator_is_told_how_to_route() -> None:
    command = coordinator_command(EVERYTHING, ADDRESS, LIFELINE)
    assert tyro.cli(CoordinatorConfig, args=flags(command, "homing.coordinator")) == (
        CoordinatorConfig(
            bind=ADDRESS,
            keys=Path("/fleet keys"),
            policy="round_robin",
            alpha=0.25,
            routing_load="tokens",
            prefix_ttl_s=60.0,
            max_queued_requests=7,
            lifeline_fd=LIFELINE,
            verbose=True,
        )
    )


def test_each_engine_is_told_its_rank_and_the_rest_alike() -> None:
    commands = engine_commands(EVERYTHING, ADDRESS, LIFELINE)
    assert [command.name for command in commands] == ["engine-0", "engine-1"]
    for rank, command in enumerate(commands):
        assert tyro.cli(EngineConfig, args=flags(command, "homing.engine")) == EngineConfig(
            model="/models/some model",
            coordinator=ADDRESS,
            keys=Path("/fleet keys"),
            rank=rank,
            dtype="fp32",
            quantization="int8",
            kv_cache_dtype="fp8",
            max_model_len=512,
            kv_cache_gb=0.5,
            block_size=32,
            kv_events=True,
            enable_prefix_caching=False,
            prefix_caching_eviction_policy="ref_zero",
            preemption="offload",
            enable_chunked_prefill=False,
            attention_backend="flashinfer",
            sampling_backend="flashinfer",
            device="cuda",
            num_cuda_graphs=4,
            cuda_graph_max_requests=6,
            batch_invariant=True,
            max_batch_requests=8,
            max_step_tokens=128,
            num_threads=3,
            served_model_name="little",
            join_timeout_s=11.0,
            lifeline_fd=LIFELINE,
            verbose=True,
        )


def test_each_frontend_is_told_its_own_listening_socket(listeners: list[socket.socket]) -> None:
    commands = frontend_commands(EVERYTHING, ADDRESS, listeners, LIFELINE)
    for listener, command in zip(listeners, commands, strict=True):
        config = tyro.cli(FrontendConfig, args=flags(command, "homing.frontend"))
        assert (config.coordinator, config.fd) == (ADDRESS, listener.fileno())
        assert (config.tokenizer, config.join_timeout_s) == ("/models/tokenizer", 11.0)
        assert (config.lifeline_fd, config.verbose) == (LIFELINE, True)
        for name in PASSED_ON_TO_FRONTENDS:
            assert getattr(config, name) == getattr(EVERYTHING, name)
        assert set(command.pass_fds) == {listener.fileno(), LIFELINE}


def test_the_threads_of_all_ranks_are_no_more_than_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    assert LaunchConfig(data_parallel_size=3).engine_threads == 2
    assert LaunchConfig(data_parallel_size=16).engine_threads == 1
    assert LaunchConfig(data_parallel_size=2, num_threads=5).engine_threads == 5


def test_the_default_policy_is_one_however_the_fleet_is_started() -> None:
    policy = CoordinatorConfig().policy
    assert LaunchConfig().routing_policy == policy
    assert LlmConfig().routing_policy == policy


def test_a_routing_policy_that_there_is_not_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no_such_policy"):
        coordinator_command(LaunchConfig(routing_policy="no_such_policy"), ADDRESS, LIFELINE)


def test_a_clean_stop_takes_less_than_ten_seconds_at_the_worst() -> None:
    assert FRONTEND_STOP_S + ENGINE_STOP_S + COORDINATOR_STOP_S < 10


def test_the_manual_has_every_flag_with_its_default() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = [row.split("|") for row in manual.splitlines() if row.startswith("| `--")]
    default_of_flag = {
        flag.strip(" `").split()[0]: default.strip() for _, flag, default, *_ in rows
    }
    assert default_of_flag == {
        f"--{'no-' * (default is True)}{name.replace('_', '-')}": (
            "" if isinstance(default, bool) or default in (None, ()) else str(default)
        )
        for name, default in vars(LaunchConfig()).items()
        if name != "model"
    }
