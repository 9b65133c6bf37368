"""A row's logits have the same bits whatever else is in the batch, the cache or the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from homing.engine.models import Model
from tests.support.backends import BACKENDS, load_backend
from tests.support.batches import Driver
from tests.support.tiny_models import make_tiny_model, random_tokens

# Over three splits of the KV cache, and beyond the window of the tiny Mistral.
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    for family in ("qwen2", "qwen3", "mistral"):
        make_tiny_model(family, directory / family)
    return directory


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "mistral"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(checkpoints: Path, family: str, backend: str, dtype: str) -> Model:
    return load_backend(checkpoints / family, backend, dtype=dtype)


@pytest.fixture(scope="module")
def alone(model: Model) -> Tensor:
    """The logits of one request, prefilled in one step of its own."""
    return Driver(model).step({0: tokens()})


def tokens(seed: int = 0) -> list[int]:
    return random_tokens(NUM_TOKENS, seed)


def test_rows_do_not_depend_on_how_a_prompt_is_chunked(model: Model, alone: Tensor) -> None:
    driver, prompt, rows, start = Driver(model), tokens(), [], 0
    for chunk in (1, 2, 3, 5, 8, 13, 100, 64, 7, 97):
        rows.append(driver.step({0: prompt[start : start + chunk]}))
        start += chunk
    assert start == NUM_TOKENS
    assert torch.equal(torch.cat(rows), alone)


def test_rows_do_not_depend_on_being_decoded_or_prefilled(model: Model, alone: Tensor) -> None:
    driver, prompt = Driver(model), tokens()
    driver.step({0: prompt[:120]})
    rows = [driver.step({0: [token]}) for token in prompt[120:150]]
    assert torch.equal(torch.cat(rows), alone[120:150])


def test_rows_do_not_depend_on_the_other_requests(model: Model, alone: Tensor) -> None:
    driver, prompt = Driver(model, num_requests=4), tokens()
    others = [tokens(seed) for seed in (1, 2, 3)]
    first = driver.step({1: others[0][:31], 0: prompt[:140], 2: others[1][:1]})
    assert torch.equal(first[31:171], alone[:140])
    for i, token in enumerate(prompt[140:150]):
        batch = {
            2: others[1][i + 1 : i + 2],
            3: others[2][:5],
            0: [token],
            1: others[0][31 + i :][:1],
        }
        assert torch.equal(driver.step(batch)[6], alone[140 + i])
    rest = driver.step({0: prompt[150:], 3: others[2][50:250]})
    assert torch.equal(rest[:150], alone[150:])


def test_rows_do_not_depend_on_what_the_cache_held_before(model: Model, alone: Tensor) -> None:
    driver = Driver(model)
    generator = torch.Generator().manual_seed(2)
    for tensor in driver.cache.keys + driver.cache.values:
        tensor.copy_(50 * torch.randn(tensor.shape, generator=generator))
    assert torch.equal(driver.step({0: tokens()}), alone)


def test_rows_do_not_depend_on_the_number_of_threads(
    checkpoints: Path, family: str, backend: str, dtype: str, alone: Tensor
) -> None:
    threaded = load_backend(checkpoints / family, backend, dtype=dtype, num_threads=2)
    assert torch.equal(Driver(threaded).step({0: tokens()}), alone)
    driver = Driver(threaded)
    driver.step({0: tokens()[:255]})  # one row of two splits: its heads are cut between threads
    assert torch.equal(driver.step({0: tokens()[255:256]})[0], alone[255])


def test_two_models_in_one_process_do_not_disturb_each_other(
    checkpoints: Path, family: str, backend: str, dtype: str, model: Model, alone: Tensor
) -> None:
    other = Driver(load_backend(checkpoints / "qwen3", backend, dtype=dtype))
    driver, rows, prompt = Driver(model), [], tokens()
    for start in range(0, NUM_TOKENS, 50):
        rows.append(driver.step({0: prompt[start : start + 50]}))
        other.step({0: prompt[start : start + 7]})
    assert torch.equal(torch.cat(rows), alone)


def test_only_the_selected_rows_are_returned(model: Model, alone: Tensor) -> None:
    driver = Driver(model)
    selected = torch.tensor([0, 17, 299], dtype=torch.int32)
    assert torch.equal(driver.step({0: tokens()}, selected=selected), alone[selected.long()])
    nothing = driver.step({0: [9]}, selected=selected[:0])
    assert nothing.shape == (0, model.shape.vocab_size)
