"""`homing bench precision` on a tiny model: what it prints of a precision, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from homing.bench import precision
from homing.bench.precision import PrecisionBenchConfig, read
from homing.errors import ConfigError
from tests.support.backends import load_backend
from tests.support.batches import Driver
from tests.support.tiny_models import make_tiny_model, random_tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def test_it_compares_each_precision_with_fp32(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(200)
    monkeypatch.setattr(precision, "_tokens", lambda config, files: tokens)
    config = PrecisionBenchConfig(
        str(directory),
        precisions=("fp32", "int8", "int4/fp8", "bf16/int8"),
        batch=(1, 2),
        context=20,
        prefill_tokens=8,
        rounds=1,
        steps=2,
        num_threads=1,
    )
    report = precision.run(config)
    results: Any = report["results"]
    formats = [(result["weights"], result["kv_cache"]) for result in results]
    assert formats == [
        ("fp32", "float32"),
        ("int8", "bfloat16"),
        ("int4", "float8_e4m3fn"),
        ("bf16", "int8"),
    ]
    fp32, int8, int4, _ = results
    assert fp32["mean_log_prob_distance"] == fp32["max_log_prob_distance"] == 0.0
    assert fp32["same_first_choice"] == 1.0
    assert 0 < int8["mean_log_prob_distance"] < int4["mean_log_prob_distance"]
    assert fp32["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"]
    assert int8["kv_bytes_per_token"] == 2 * int4["kv_bytes_per_token"]
    for result in results:
        assert set(result["decode_tokens_per_s"]) == {1, 2}
        assert result["prefill_tokens_per_s"] > 0


def test_a_text_is_read_in_chunks_as_in_one_piece(directory: Path) -> None:
    model = load_backend(directory, "c")
    tokens = list(range(8, 300))
    assert len(tokens) > 2 * precision.CHUNK_TOKENS
    reading = read(model, tokens)
    log_probs = Driver(model).step({0: tokens[:-1]}).log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(tokens[1:])[:, None]).flatten()
    assert torch.equal(reading.log_probs, chosen.double())
    assert math.isfinite(reading.log_probs.sum())


def test_the_text_that_comes_with_it_is_there() -> None:
    text = (Path(precision.__file__).parent / "data" / "passages.txt").read_text()
    assert len(text.split()) > 1000


@pytest.mark.parametrize("name", ["int3", "bf16bf16", "/int8"])
def test_an_unknown_precision_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="there are bf16"):
        PrecisionBenchConfig(precisions=(name,))
