"""Each supported family agrees with transformers, on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.backends import BACKENDS, EMULATED, Oracle, load_backend
from tests.support.batches import Driver
from tests.support.tiny_models import make_tiny_model, random_tokens

FAMILIES = ("llama", "llama3_rope", "llama_tied_yarn", "mistral", "qwen2", "qwen3")
PROMPT_LENGTHS = (1, 19, 130)  # below and above the windows of 16 and the splits of 128 tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make_tiny_model(family, directory / family)
    return directory


@pytest.mark.parametrize("backend", [*BACKENDS, EMULATED])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_equal_those_of_transformers(
    checkpoints: Path, family: str, backend: str
) -> None:
    model = load_backend(checkpoints / family, backend)
    oracle = Oracle(checkpoints / family)
    for length in PROMPT_LENGTHS:
        tokens = random_tokens(length)
        torch.testing.assert_close(
            Driver(model).step({0: tokens}), oracle.logits(tokens), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("backend", [*BACKENDS, EMULATED])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_greedy_tokens_equal_generate(checkpoints: Path, family: str, backend: str) -> None:
    model = load_backend(checkpoints / family, backend)
    oracle = Oracle(checkpoints / family)
    for length in PROMPT_LENGTHS:
        prompt = random_tokens(length)
        assert Driver(model).greedy(prompt, 16) == oracle.greedy(prompt, 16)


@pytest.mark.parametrize("backend", [*BACKENDS, EMULATED])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_log_probs_stay_near_fp32(checkpoints: Path, family: str, backend: str) -> None:
    """Weights of 8 bits of mantissa, logits of spread 3: a mean distance of a few hundredths."""
    model = load_backend(checkpoints / family, backend, dtype="bf16")
    tokens = random_tokens(130)
    ours = Driver(model).step({0: tokens}).log_softmax(-1)
    truth = Oracle(checkpoints / family).logits(tokens).log_softmax(-1)
    assert (ours - truth).abs().mean() < 0.05


@pytest.mark.parametrize("backend", ["c", EMULATED])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_c_kernels_agree_with_the_torch_reference_in_bf16(
    checkpoints: Path, family: str, backend: str
) -> None:
    """The same rounding of weights and cache in both; a key on the border may round either way.
    Where the CPU multiplies bf16, activations are rounded, too."""
    tokens = random_tokens(130)
    model = load_backend(checkpoints / family, backend, dtype="bf16")
    reference = load_backend(checkpoints / family, "torch", dtype="bf16")
    distance = (Driver(model).step({0: tokens}) - Driver(reference).step({0: tokens})).abs()
    rounds_activations = getattr(model, "instructions", "").endswith("bf16")
    assert distance.max() < (0.3 if rounds_activations else 0.1)
    assert distance.mean() < (0.03 if rounds_activations else 2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sharded_checkpoint_loads_as_a_single_file_does(
    checkpoints: Path, tmp_path: Path, backend: str
) -> None:
    sharded = make_tiny_model("llama", tmp_path / "llama", max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tokens = random_tokens(20)
    one_file, shards = (
        Driver(load_backend(directory, backend)).step({0: tokens})
        for directory in (checkpoints / "llama", sharded)
    )
    assert torch.equal(one_file, shards)
