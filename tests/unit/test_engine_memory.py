"""What a suspension gives back to the system, measured, and that it comes back as it was."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from homing.engine.memory import Spill, release
from homing.params import SamplingParams
from homing.wire import KVMode, WeightsMode
from tests.support.backends import BACKENDS, load_backend
from tests.support.engine_run import run, small_engine
from tests.support.tiny_models import make_tiny_model

MIB = 2**20


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def test_released_memory_is_the_systems_again() -> None:
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    before = resident_bytes()
    assert release([tensor]) > 63 * MIB
    assert resident_bytes() < before - 60 * MIB
    assert tensor[4096:-4096].sum() == 0


def test_a_spill_brings_back_what_was_written() -> None:
    tensors = [torch.randn(3, 5).bfloat16(), torch.randn(7), torch.arange(4)]
    spill = Spill()
    for tensor in tensors:
        spill.write(tensor)
    spill.rewind()
    assert all(torch.equal(spill.read(tensor), tensor) for tensor in tensors)
    with pytest.raises(OSError, match="ends 28 bytes early"):
        spill.read(tensors[1])
    spill.close()


@pytest.mark.parametrize("kv", [KVMode.OFFLOAD, KVMode.DISCARD])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_suspension_gives_the_cache_back(directory: Path, backend: str, kv: KVMode) -> None:
    engine = small_engine(load_backend(directory, backend), num_blocks=5000)
    for layer in (*engine.runner.cache.keys, *engine.runner.cache.values):
        layer.fill_(0.5)  # as if all of it had been used
    total = sum(layer.nbytes for layer in engine.runner.cache.keys) * 2
    assert total > 50 * MIB
    engine.lifecycle.pause()
    before = resident_bytes()
    released = engine.lifecycle.suspend(kv)
    assert released.kv_bytes > 0.95 * total
    assert resident_bytes() < before - 0.9 * total


@pytest.mark.parametrize("weights", WeightsMode)
@pytest.mark.parametrize("kv", KVMode)
@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_bring_the_same_tokens_with_and_without_a_suspension(
    directory: Path, backend: str, kv: KVMode, weights: WeightsMode
) -> None:
    params = SamplingParams(seed=3, num_tokens_to_generate=24, return_log_probs=True)
    prompts = [torch.arange(8 + n, 60 + n).numpy() for n in range(3)]

    def answers(*, suspended: bool) -> list[tuple[list[int], list[bytes]]]:
        engine = small_engine(load_backend(directory, backend), num_blocks=100)
        for number, prompt in enumerate(prompts):
            engine.add_request(number, prompt, params)

        def before_step(number: int) -> None:
            if suspended and number in (1, 8):
                engine.lifecycle.pause()
                engine.lifecycle.suspend(kv, weights)
                engine.lifecycle.resume()
                engine.lifecycle.unpause()

        found = run(engine, before_step=before_step)
        return [(found[n].token_ids, found[n].log_probs) for n in range(len(prompts))]

    assert answers(suspended=True) == answers(suspended=False)


def test_weights_that_are_offloaded_are_gone_meanwhile(directory: Path) -> None:
    model = load_backend(directory, "torch")
    engine = small_engine(model, num_blocks=20)
    largest = max(model.memory, key=lambda tensor: tensor.nbytes)
    before = largest.clone()
    engine.lifecycle.pause()
    engine.lifecycle.suspend(weights=WeightsMode.OFFLOAD)
    assert largest.flatten()[2048:3072].eq(0).all()
    engine.lifecycle.resume()
    assert torch.equal(largest, before)


def test_no_room_for_the_offloaded_leaves_everything_where_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(load_backend(directory, "torch"), num_blocks=20)
    before = [tensor.clone() for tensor in engine.runner.model.memory]
    engine.lifecycle.pause()

    def full(self: Spill, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spill, "write", full)
    with pytest.raises(OSError, match="No space"):
        engine.lifecycle.suspend(weights=WeightsMode.OFFLOAD)
    engine.lifecycle.unpause()
    assert all(map(torch.equal, engine.runner.model.memory, before))
