"""What a caller may give as new weights, and what engines are told of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from homing.llm.weights import given_or_own, named_tensors, weight_update
from homing.wire import InFlightKV, UpdateWeights, WeightSource


def test_a_model_that_is_a_file_has_no_new_weights_of_its_own(tmp_path: Path) -> None:
    built = torch.nn.Linear(2, 2)
    for model in (None, "model.gguf", tmp_path / "model.gguf"):
        assert given_or_own("elsewhere", model) == "elsewhere"
        with pytest.raises(ValueError, match="name a source; this model is a file"):
            given_or_own(None, model)
    assert given_or_own(None, tmp_path) == tmp_path
    assert given_or_own(None, built) is built


def test_weights_are_a_module_a_mapping_or_pairs() -> None:
    module = torch.nn.Linear(2, 2)
    pairs = [("weight", module.weight), ("bias", module.bias)]
    for source in (module, module.state_dict(), dict(pairs), pairs, iter(pairs)):
        named = dict(named_tensors(source))
        assert named.keys() == {"weight", "bias"}
        assert all(torch.equal(named[name], tensor) for name, tensor in pairs)
    with pytest.raises(ValueError, match="the weights are of type int; they must be a directory"):
        named_tensors(7)


def test_tensors_are_in_a_file_until_the_update_is_over() -> None:
    module = torch.nn.Linear(2, 2)
    how = {"partial": True, "in_flight": "recompute", "epoch": 5}
    with weight_update(module, **how) as update:  # pyright: ignore[reportArgumentType]
        file = Path(update.path)
        assert load_file(file).keys() == {"weight", "bias"}
        assert update.source is WeightSource.SHARED_MEMORY
        assert (update.partial, update.epoch) == (True, 5)
        assert update.in_flight is InFlightKV.RECOMPUTE
    assert not file.parent.exists()


def test_directories_and_updates_are_told_as_they_are(tmp_path: Path) -> None:
    how = {"partial": False, "in_flight": InFlightKV.KEEP, "epoch": None}
    with weight_update(tmp_path / "there", **how) as update:
        assert update.source is WeightSource.DIRECTORY
        assert update.path == str(tmp_path / "there")
    made = UpdateWeights(source=WeightSource.DIRECTORY, path="/weights", epoch=3)
    with weight_update(made, **how) as update:
        assert update is made
