"""The benches of reinforcement learning, `agreement` and `weights`, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homing.bench import agreement, weights
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny"))


AGREEMENT = [
    *("--num-tokens", "200", "--tokens-per-sample", "20", "--samples-per-prompt", "5"),
    *("--prompt-words", "24", "--shared-words", "12", "--max-batch-requests", "8"),
    *("--max-step-tokens", "16", "--num-threads", "1", "--dtypes", "fp32"),
]


def test_agreement_is_measured_with_all_that_could_disturb_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agreement.main(["--model", model, *AGREEMENT]) == 0
    report = json.loads(capsys.readouterr().out)
    [result] = report["results"]
    assert result["tokens"] == 200
    assert min(result["cached_tokens"], result["preemptions"]) > 0
    assert 0 <= result["kl"] < result["max_difference"] < 1e-4


def test_a_disagreement_fails(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = agreement._reference_log_probs

    def one_is_wrong(*arguments: Any) -> np.ndarray:
        found = reference(*arguments)
        found[7] += 2e-4
        return found

    monkeypatch.setattr(agreement, "_reference_log_probs", one_is_wrong)
    assert agreement.main(["--model", model, *AGREEMENT]) == 1
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert not result["valid"]
    assert result["max_difference"] == pytest.approx(2e-4, rel=0.3)


def test_updates_of_weights_are_measured_from_each_source(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--repeats", "2", "--num-threads", "1", "--dtype", "bf16", "--trainer-dtype", "fp32"]
    assert weights.main([model, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    iterator, shared = report["results"]
    assert (iterator["source"], shared["source"]) == ("iterator", "shared_memory")
    assert iterator["publish_s"] is None
    assert shared["publish_s"] > 0
    file = Path(model, "model.safetensors")
    assert report["num_bytes"] == file.stat().st_size - _header_bytes(file)
    assert all(r["transfer_s"] > 0 < r["transfer_per_memcpy"] for r in report["results"])


def _header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")
