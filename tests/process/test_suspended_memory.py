"""What a suspended engine process gives back, as the system counts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homing.bench import suspend
from tests.support.tiny_models import make_tiny_model

# About 60 MB of weights in fp32, and 24 KiB of KV cache a token.
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1100,
}


@pytest.mark.timeout(180)
def test_weights_and_kv_cache_of_a_suspended_engine_are_the_systems_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model("llama", tmp_path / "larger", overrides=LARGER)
    weights_mib = (model / "model.safetensors").stat().st_size / 2**20
    num_tokens = 4 * 1000
    kv_mib = num_tokens * 3 * 2 * 512 * 4 / 2**20
    assert min(weights_mib, kv_mib) > 40
    flags = ["--dtype", "fp32", "--kv-cache-gb", "0.2", "--prompts", "4", "--num-threads", "1"]
    assert suspend.main([str(model), *flags]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    rss = {result["state"]: result["rss_mib"] for result in results}
    assert rss["has served"] > rss["loaded"] + 0.8 * kv_mib
    assert rss["KV discarded"] < rss["has served"] - 0.8 * kv_mib
    assert rss["weights offloaded, too"] < rss["KV discarded"] - 0.8 * weights_mib
    assert rss["resumed"] > rss["weights offloaded, too"] + 0.8 * weights_mib
