"""`homing bench engine` on a tiny model: what it prints, and that its bounds are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from homing.bench import engine
from homing.bench.engine import EngineBenchConfig, Limits, Run, StepCost
from homing.engine.models import ModelShape
from tests.support.tiny_models import make_tiny_model

SHAPE = ModelShape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=100,
    max_context_tokens=64,
    eos_token_ids=(),
    dtype=torch.bfloat16,
)
COST = StepCost(SHAPE, layer_weights=1000, head_weights=100)


def test_it_measures_every_batch_and_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "measure_limits", lambda shape: Limits(10.0, 100.0))
    model = str(make_tiny_model("llama", tmp_path))
    config = EngineBenchConfig(
        model, batch="1,3", prompt_tokens="20,40", output_tokens=4, num_threads=1, seconds=0.0
    )
    report = engine.run(config)
    results = report["results"]
    assert isinstance(results, list)
    measured = [(r["kind"], r["batch"], r["context_tokens"]) for r in results]
    assert measured == [
        *(("decode", batch, prompt + 4) for prompt in (20, 40) for batch in (1, 3)),
        *(("prefill", 1, prompt) for prompt in (20, 40)),
    ]
    assert all(r["ms_per_step_min"] > 0 and r["tokens_per_s"] > 0 for r in results)
    assert report["limits"] == {"read_gb_per_s": 10.0, "gflop_per_s": 100.0}
    assert (report["kernels"] is None) == (report["backend"] != "CDecoder")


def test_a_decode_step_reads_weights_once_and_the_context_of_each_request() -> None:
    run = Run("decode", batch=3, rows=3, context_tokens=10, seconds=[])
    kv_bytes_per_token = 2 * 2 * 2 * 8 * 2  # keys and values, layers, kv heads, head_dim, bf16
    assert COST.read_bytes(run) == 1100 * 2 + 3 * 10 * kv_bytes_per_token
    attention = 2 * 2 * 4 * 8  # scores and values, layers, heads, head_dim
    assert COST.flop(run) == 2 * 3 * (1100 + 10 * attention)


def test_products_of_pairs_count_half() -> None:
    run = Run("decode", batch=1, rows=1, context_tokens=0, seconds=[])
    assert replace(COST, in_pairs=True).flop(run) == COST.flop(run) / 2


def test_a_prefill_computes_the_head_once_and_attends_to_half_of_the_context() -> None:
    run = Run("prefill", batch=1, rows=10, context_tokens=10, seconds=[])
    assert COST.flop(run) == 2 * (10 * 1000 + 100 + 10 * 5 * (2 * 2 * 4 * 8))
