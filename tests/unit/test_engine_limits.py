"""Settings that cannot work are refused in one line that says what would."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from homing.engine.config import EngineConfig
from homing.engine.kv_cache import block_bytes
from homing.engine.limits import GIB, engine_limits
from homing.engine.models import ModelShape
from homing.errors import ConfigError

SHAPE = ModelShape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    vocab_size=320,
    max_context_tokens=2048,
    eos_token_ids=(2,),
    dtype=torch.bfloat16,
)


def config(**fields: object) -> EngineConfig:
    return EngineConfig(coordinator="tcp://127.0.0.1:1", **fields)  # type: ignore[arg-type]


def test_the_cache_holds_as_many_blocks_as_its_memory_does():
    limits = engine_limits(config(kv_cache_gb=0.01), SHAPE)
    assert limits.num_blocks == int(0.01 * GIB) // block_bytes(SHAPE, 16)
    assert limits.max_context_tokens == 2048


def test_a_default_cache_holds_a_whole_context():
    limits = engine_limits(config(), SHAPE)
    assert (limits.num_blocks - 1) * limits.block_size >= limits.max_context_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_gb": 0.0001}, "raise --kv-cache-gb to 0.01 or lower --max-model-len"),
        ({"kv_cache_gb": -1.0}, "--kv-cache-gb is -1"),
        ({"kv_cache_gb": 1e9}, "the machine has"),
        ({"max_model_len": 4096}, "--max-model-len is 4,096; the model's context is 2,048"),
        ({"max_model_len": 1}, "--max-model-len is 1"),
        ({"block_size": 0}, "--block-size is 0; it must be at least 1"),
        ({"max_step_tokens": 8}, "--max-step-tokens 8 is less than --max-batch-requests 64"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(fields: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        engine_limits(config(**fields), SHAPE)
    assert "\n" not in str(caught.value)


def test_the_memory_that_a_refusal_names_is_enough():
    with pytest.raises(ConfigError) as caught:
        engine_limits(config(kv_cache_gb=0.0001), SHAPE)
    named = float(str(caught.value).split("--kv-cache-gb to ")[1].split()[0])
    engine_limits(config(kv_cache_gb=named), SHAPE)


def test_the_settings_can_be_read_without_torch():
    code = "import sys, homing.engine.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
