"""`homing bench soak`: the engine under random traffic, in the form that every run can afford."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.bench.soak import MAX_GROWN_MIB, SoakBenchConfig, run
from homing.errors import ConfigError
from tests.support.tiny_models import make_tiny_model


def test_random_traffic_on_a_small_cache_goes_right_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    report = run(SoakBenchConfig(str(model), dtype="fp32", requests=600, num_threads=1))
    [result] = report["results"]
    assert result["wrong_answers"] == 0
    assert result["blocks_held"] == result["unfinished_requests"] == 0
    assert sum(result["ends"].values()) == 600
    assert result["ends"]["abort"] > 30
    assert result["preemptions"] > 100
    assert result["rss_grown_mib"] < MAX_GROWN_MIB


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="--requests"):
        SoakBenchConfig(requests=0)
    with pytest.raises(ConfigError, match="--cache-tokens"):
        SoakBenchConfig(cache_tokens=16)
