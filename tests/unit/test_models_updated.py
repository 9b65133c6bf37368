"""A model that is updated: new parameters here, the old model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from homing.engine.models import Model
from tests.support.backends import BACKENDS, load_backend
from tests.support.batches import Driver
from tests.support.tiny_models import make_tiny_model

FAMILIES = ("llama", "qwen3", "qwen2")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    return {
        (family, seed): make_tiny_model(family, tmp_path_factory.mktemp("model"), seed=seed)
        for family in FAMILIES
        for seed in (0, 1)
    }


def logits(model: Model) -> Tensor:
    return Driver(model, max_tokens=64).step({0: list(range(8, 30))})


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_updated_to_a_checkpoint_computes_the_bits_of_one_loaded_from_it(
    directories: dict[tuple[str, int], Path], family: str, backend: str, dtype: str
) -> None:
    old = load_backend(directories[family, 0], backend, dtype=dtype)
    before = logits(old)
    new = tensors_of(directories[family, 1])
    assert set(new) == set(old.parameter_shapes)
    assert {name: tuple(t.shape) for name, t in new.items()} == dict(old.parameter_shapes)
    updated = old.updated(new)
    fresh = load_backend(directories[family, 1], backend, dtype=dtype)
    assert torch.equal(logits(updated), logits(fresh))
    assert torch.equal(logits(old), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_parameter_after_the_other_gives_the_whole(
    directories: dict[tuple[str, int], Path], backend: str
) -> None:
    """Each is a part of something fused, whose rest must come out of the old model unchanged."""
    model = load_backend(directories["qwen3", 0], backend, dtype="bf16")
    for name, tensor in tensors_of(directories["qwen3", 1]).items():
        model = model.updated({name: tensor})
    fresh = load_backend(directories["qwen3", 1], backend, dtype="bf16")
    assert torch.equal(logits(model), logits(fresh))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_updated_model_shares_no_memory_with_what_it_was_given(
    directories: dict[tuple[str, int], Path], backend: str
) -> None:
    model = load_backend(directories["llama", 0], backend)
    new = tensors_of(directories["llama", 1])
    updated = model.updated(new)
    before = logits(updated)
    for tensor in new.values():
        tensor.fill_(7.0)
    assert torch.equal(logits(updated), before)
    given = {tensor.untyped_storage().data_ptr() for tensor in new.values()}
    assert not given & {tensor.untyped_storage().data_ptr() for tensor in updated.memory}
