"""Which device and backends an engine takes, and what it says of those that it cannot have."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from homing.engine import limits as engine_limits_module
from homing.engine import startup, weights
from homing.engine.config import EngineConfig
from homing.engine.devices import Machine, choose_attention, choose_device, choose_sampling
from homing.engine.limits import engine_limits
from homing.engine.models import CPU, ModelShape
from homing.errors import ConfigError, NotAllowed
from homing.llm import Engine as PythonEngine
from homing.wire import FleetState, KVMode, WeightsMode
from tests.support.fake_model import make_engine
from tests.support.tiny_llm import SMALL
from tests.support.tiny_models import make_tiny_model

BARE = Machine(num_gpus=0, has_flashinfer=False)
GPUS = Machine(num_gpus=2, has_flashinfer=True)
NO_PACKAGE = Machine(num_gpus=2, has_flashinfer=False)
CUDA = torch.device("cuda", 0)
SHAPE = ModelShape(2, 4, 2, 64, 256, 320, 512, (2,), torch.bfloat16, device=CUDA)


@pytest.mark.parametrize(
    ("asked", "machine", "rank", "device"),
    [
        ("auto", BARE, 0, "cpu"),
        ("auto", GPUS, None, "cuda:0"),
        ("cuda", GPUS, 1, "cuda:1"),
        ("cuda", GPUS, 2, "cuda:0"),
        ("cuda:1", GPUS, 0, "cuda:1"),
        ("cpu", GPUS, 0, "cpu"),
    ],
)
def test_ranks_share_out_the_gpus(
    asked: str, machine: Machine, rank: int | None, device: str
) -> None:
    assert choose_device(asked, machine, rank=rank) == torch.device(device)


def test_what_only_a_cpu_has_is_computed_there_unless_a_gpu_was_asked_for() -> None:
    assert choose_device("auto", GPUS, needs_cpu=True) == CPU
    assert choose_device("cuda", GPUS, needs_cpu=True) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("asked", "machine", "message"),
    [
        ("cuda", BARE, "--device cuda: torch .* finds no GPU here: choose --device cpu, or"),
        ("cuda:2", GPUS, "--device cuda:2: there are 2 GPUs, from cuda:0 on"),
        ("tpu", BARE, "--device is 'tpu'; it must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_an_error_that_names_the_fix(
    asked: str, machine: Machine, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device(asked, machine)


@pytest.mark.parametrize(
    ("asked", "shape", "machine", "chosen"),
    [
        (None, replace(SHAPE, device=CPU), GPUS, None),
        ("cpu", replace(SHAPE, device=CPU), GPUS, "cpu"),
        ("torch", replace(SHAPE, device=CPU), BARE, "torch"),
        (None, SHAPE, GPUS, "flashinfer"),
        ("torch", SHAPE, GPUS, "torch"),
        (None, SHAPE, NO_PACKAGE, "torch"),
        (None, replace(SHAPE, dtype=torch.float32), GPUS, "torch"),
    ],
)
def test_attention_is_the_fastest_that_can_be_had(
    asked: Any, shape: ModelShape, machine: Machine, chosen: str | None
) -> None:
    assert choose_attention(asked, shape, machine) == chosen


def test_slow_attention_on_a_gpu_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_attention(None, SHAPE, NO_PACKAGE)
        choose_attention(None, replace(SHAPE, dtype=torch.float32), GPUS)
    assert "the package is missing: pip install 'homing[cuda]'" in caplog.text
    assert "it computes in bf16 and fp16 alone" in caplog.text


@pytest.mark.parametrize(
    ("asked", "shape", "machine", "message"),
    [
        ("flashinfer", replace(SHAPE, device=CPU), BARE, "needs a GPU: leave it out"),
        ("flashinfer", SHAPE, NO_PACKAGE, "the package is missing: pip install"),
        ("flashinfer", replace(SHAPE, head_dim=80), GPUS, "heads of 80 .*: choose"),
        ("cpu", SHAPE, GPUS, "--attention-backend cpu is for --device cpu"),
    ],
)
def test_attention_that_cannot_be_had_is_an_error_that_names_the_fix(
    asked: Any, shape: ModelShape, machine: Machine, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_attention(asked, shape, machine)


def test_sampling_is_where_the_logits_are_if_it_can_be() -> None:
    assert choose_sampling(None, CPU, GPUS) == choose_sampling("torch", CUDA, GPUS) == "torch"
    assert choose_sampling(None, CUDA, GPUS) == choose_sampling("flashinfer", CUDA, GPUS)
    assert choose_sampling(None, CUDA, NO_PACKAGE) == "torch"
    with pytest.raises(ConfigError, match="--sampling-backend flashinfer needs a GPU"):
        choose_sampling("flashinfer", CPU, GPUS)
    with pytest.raises(ConfigError, match="the package is missing: pip install"):
        choose_sampling("flashinfer", CUDA, NO_PACKAGE)


# By the settings of an engine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "--device cuda: torch"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer needs a GPU"),
        ({"sampling_backend": "flashinfer"}, "--sampling-backend flashinfer needs a GPU"),
    ],
)
def test_an_engine_without_a_gpu_says_in_one_line_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: BARE)
    model = make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        PythonEngine(model, config=replace(SMALL, **settings))
    assert "\n" not in str(caught.value)


def test_quantized_weights_are_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: GPUS)
    files = weights.resolve_model(str(make_tiny_model("llama", tmp_path)))
    with pytest.raises(ConfigError, match="--quantization int8 is for --device cpu"):
        weights.load_model(files, quantization="int8", backend="torch", device=CUDA)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 2, 4, 8, 16, 32, 64)),
        ({"num_cuda_graphs": 0}, ()),
        ({"num_cuda_graphs": 2, "cuda_graph_max_requests": 24}, (12, 24)),
        ({"max_batch_requests": 3}, (1, 2, 3)),
    ],
)
def test_settings_say_which_batches_have_graphs(
    settings: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert startup.graph_sizes_of(EngineConfig(coordinator="", **settings)) == sizes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_cuda_graphs": -1}, "--num-cuda-graphs is -1; it must be at least 0"),
        ({"cuda_graph_max_requests": 0}, "--cuda-graph-max-requests is 0; it must be at least 1"),
    ],
)
def test_graphs_that_cannot_be_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        startup.graph_sizes_of(EngineConfig(coordinator="", **settings))


def test_a_cache_on_a_gpu_takes_most_of_what_is_free_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_limits_module, "free_memory", lambda device: 2**30)
    block_bytes = 2 * 2 * 2 * 64 * 16 * 2  # keys and values, layers, heads, head, tokens, bf16
    config = EngineConfig(coordinator="", max_batch_requests=10_000, max_step_tokens=10_000)
    assert engine_limits(config, SHAPE).num_blocks == int(0.85 * 2**30) // block_bytes
    with pytest.raises(ConfigError, match=r"--kv-cache-gb is 3; free cuda:0 has 1\.0 GiB"):
        engine_limits(replace(config, kv_cache_gb=3.0), SHAPE)


def test_memory_of_a_gpu_is_not_given_back() -> None:
    engine, model = make_engine()
    model.shape = replace(model.shape, device=CUDA)
    engine.lifecycle.pause()
    for kv, kept in ((KVMode.DISCARD, WeightsMode.KEEP), (KVMode.PERSIST, WeightsMode.OFFLOAD)):
        with pytest.raises(NotAllowed, match="a GPU's memory cannot be given back"):
            engine.lifecycle.suspend(kv, kept)
    engine.lifecycle.suspend()
    assert engine.lifecycle.state is FleetState.SUSPENDED
