"""Rounded weights and KV caches: backends agree, a row's bits depend on the row alone, and
updates round, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from homing.engine.kv_cache import KVCache, block_bytes, read_slots, write_slots
from homing.engine.models import Model
from homing.params import SamplingParams
from tests.support.backends import BACKENDS, EMULATED, load_backend
from tests.support.batches import Driver
from tests.support.engine_run import run, small_engine
from tests.support.tiny_models import make_tiny_model, random_tokens

PRECISIONS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp16": {"dtype": "fp16"},
    "all of int8": {"dtype": "bf16", "quantization": "int8", "kv_cache_dtype": "int8"},
}
NUM_TOKENS = 300  # over three splits of the KV cache


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one model. Inner sizes fill no group of 64."""
    return [make_tiny_model("qwen3", tmp_path_factory.mktemp("m"), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module", params=PRECISIONS.values(), ids=list(PRECISIONS))
def precision(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module", params=(*BACKENDS, EMULATED))
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(directories: list[Path], backend: str, precision: dict[str, Any]) -> Model:
    return load_backend(directories[0], backend, **precision)


@pytest.fixture(scope="module")
def alone(model: Model) -> Tensor:
    return Driver(model).step({0: tokens()})


def tokens(seed: int = 0) -> list[int]:
    return random_tokens(NUM_TOKENS, seed)


def test_chunks_decodes_and_neighbours_change_no_bit(model: Model, alone: Tensor) -> None:
    driver, prompt, other = Driver(model, num_requests=2), tokens(), tokens(1)
    rows = [driver.step({0: prompt[:7]}), driver.step({0: prompt[7:120], 1: other[:30]})[:113]]
    rows += [driver.step({0: [token], 1: [5]})[:1] for token in prompt[120:140]]
    rows += [driver.step({1: other[:3], 0: prompt[140:]})[3:]]
    assert torch.equal(torch.cat(rows), alone)


def test_threads_change_no_bit(
    directories: list[Path], backend: str, precision: dict[str, Any], alone: Tensor
) -> None:
    threaded = load_backend(directories[0], backend, **precision, num_threads=2)
    assert torch.equal(Driver(threaded).step({0: tokens()}), alone)


def test_what_the_cache_held_before_changes_no_bit(model: Model, alone: Tensor) -> None:
    driver = Driver(model)
    generator = torch.Generator().manual_seed(2)
    for tensor in driver.cache.keys + driver.cache.values:
        tensor.view(torch.uint8).random_(0, 100, generator=generator)
    assert torch.equal(driver.step({0: tokens()}), alone)


def test_preemptions_and_prefix_hits_change_no_answer(
    directories: list[Path], precision: dict[str, Any]
) -> None:
    model = load_backend(directories[0], "c", **precision)

    def answers(num_blocks: int, batch: int) -> list[list[int]]:
        engine = small_engine(model, num_blocks, max_batch_requests=batch, max_step_tokens=40)
        params = SamplingParams(seed=3, num_tokens_to_generate=30, ignore_eos=True)
        for number in range(4):  # all with the first 64 tokens in common
            engine.add_request(number, np.array(tokens()[:64] + tokens(number)[:40]), params)
        result = run(engine)
        assert (engine.counters.preemptions > 0) == (num_blocks < 20)
        return [result[number].token_ids for number in range(4)]

    assert answers(num_blocks=18, batch=4) == answers(num_blocks=100, batch=1)


@pytest.mark.parametrize("kernels", ["c", EMULATED])
def test_the_c_kernels_agree_with_the_torch_reference(
    directories: list[Path], kernels: str, precision: dict[str, Any]
) -> None:
    """C rounds activations to 16 bits where weights are integers, and a number of the cache that
    lies on a border may be rounded either way."""
    expected, logits = (
        Driver(load_backend(directories[0], backend, **precision)).step({0: tokens()[:150]})
        for backend in ("torch", kernels)
    )
    assert (logits - expected).abs().mean() < (5e-3 if "dtype" in precision else 5e-4)
    assert (logits - expected).abs().max() < 0.2


def test_log_probs_stay_near_those_of_fp32(
    directories: list[Path], backend: str, precision: dict[str, Any], alone: Tensor
) -> None:
    truth = Driver(load_backend(directories[0], backend)).step({0: tokens()}).log_softmax(-1)
    distance = (alone.log_softmax(-1) - truth).abs().mean()
    assert 0 < distance < (0.5 if precision.get("quantization") == "int4" else 0.15)


def test_an_update_rounds_what_it_brings(
    directories: list[Path], backend: str, precision: dict[str, Any], model: Model, alone: Tensor
) -> None:
    new = load_file(directories[1] / "model.safetensors")
    fresh = load_backend(directories[1], backend, **precision)
    expected = Driver(fresh).step({0: tokens()[:40]})
    assert torch.equal(Driver(model.updated(new)).step({0: tokens()[:40]}), expected)
    by_parts = model
    for name, tensor in new.items():  # each a part of something fused, whose rest must not change
        by_parts = by_parts.updated({name: tensor})
    assert torch.equal(Driver(by_parts).step({0: tokens()[:40]}), expected)
    assert torch.equal(Driver(model).step({0: tokens()}), alone)


def test_rounded_weights_take_less_memory(directories: list[Path]) -> None:
    def num_bytes(quantization: str | None) -> int:
        model = load_backend(directories[0], "c", dtype="bf16", quantization=quantization)
        return sum(tensor.nbytes for tensor in model.memory)

    sizes = [num_bytes(name) for name in (None, "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_cache_of_bytes_holds_nearly_twice_as_much(directories: list[Path]) -> None:
    def size(kv_cache_dtype: str) -> int:
        shape = load_backend(
            directories[0], "torch", dtype="bf16", kv_cache_dtype=kv_cache_dtype
        ).shape
        return block_bytes(shape, 16)

    assert size("fp8") * 2 == size("bf16")
    assert size("int8") * 2 == size("bf16") * 36 / 32  # heads of 32, and their scales


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.01), ("fp8", 0.04)])
def test_reference_slots_read_what_was_written_but_for_rounding(
    directories: list[Path], dtype: str, error: float
) -> None:
    shape = load_backend(directories[0], "torch", kv_cache_dtype=dtype).shape
    cache = KVCache.allocate(shape, 2, 16).keys[0]
    new = torch.randn(3, shape.num_kv_heads, shape.head_dim)
    slots = torch.tensor([4, 20, 31])
    write_slots(cache, new, slots)
    assert (read_slots(cache, slots) - new).norm() / new.norm() < error
    assert not read_slots(cache, torch.tensor([5])).any()


def test_an_fp8_cache_holds_at_most_448(directories: list[Path]) -> None:
    shape = load_backend(directories[0], "torch", kv_cache_dtype="fp8").shape
    cache = KVCache.allocate(shape, 1, 16).keys[0]
    write_slots(cache, torch.full((1, shape.num_kv_heads, shape.head_dim), 1e4), torch.tensor([0]))
    assert read_slots(cache, torch.tensor([0])).eq(448).all()
