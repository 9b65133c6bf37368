"""The C kernels on other shapes than the tiny families': heads, head sizes, blocks, vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from homing.engine.kernels.decoder import why_unsupported
from homing.engine.models.config import read_config
from tests.support.backends import EMULATED, load_backend
from tests.support.batches import Driver
from tests.support.tiny_models import make_tiny_model, random_tokens

SHAPES = {
    "one query head a kv head": {"num_key_value_heads": 4},
    "8 query heads on one kv head": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "7 query heads on one kv head": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "heads of 80": {"head_dim": 80},
    "heads of 128": {"head_dim": 128, "num_hidden_layers": 1},
    "a vocabulary that fills no panel": {"vocab_size": 333},
}


@pytest.mark.parametrize("backend", ["c", EMULATED])
@pytest.mark.parametrize("overrides", SHAPES.values(), ids=SHAPES.keys())
def test_they_agree_with_the_reference_and_with_themselves(
    overrides: dict[str, int], backend: str, tmp_path: Path
) -> None:
    directory = make_tiny_model("qwen3", tmp_path, overrides={"head_dim": 16, **overrides})
    tokens = random_tokens(150)
    expected, logits = (
        Driver(load_backend(directory, name)).step({0: tokens}) for name in ("torch", backend)
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    driver = Driver(load_backend(directory, backend, num_threads=2), num_requests=2)
    driver.step({0: tokens[:130]})
    rows = [driver.step({0: [token], 1: tokens[:9]})[0] for token in tokens[130:140]]
    assert torch.equal(torch.stack(rows), logits[130:140])


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["c", EMULATED])
def test_bits_do_not_depend_on_the_block_size(
    backend: str, dtype: str, block_size: int, tmp_path: Path
) -> None:
    model = load_backend(make_tiny_model("mistral", tmp_path), backend, dtype=dtype)
    tokens = list(range(10, 310))
    usual = Driver(model).step({0: tokens})
    driver = Driver(model, block_size=block_size)
    parts = [driver.step({0: tokens[:200]}), driver.step({0: tokens[200:]})]
    assert torch.equal(torch.cat(parts), usual)


def test_what_they_cannot_run_is_said(tmp_path: Path) -> None:
    config = read_config(make_tiny_model("qwen3", tmp_path, overrides={"head_dim": 24}))
    assert "multiple of 16" in (why_unsupported(config) or "")


def test_a_shape_without_kernels_runs_in_torch(tmp_path: Path) -> None:
    directory = make_tiny_model("qwen3", tmp_path, overrides={"head_dim": 24})
    assert Driver(load_backend(directory, "torch")).greedy([9, 10, 11], 3)
