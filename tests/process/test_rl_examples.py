"""The examples of reinforcement learning, in short form, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.support.tiny_models import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name: str, *flags: str) -> str:
    """The example's stdout."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # the models are too small for two
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def learn(tmp_path: Path, *flags: str) -> list[dict[str, float]]:
    curve = tmp_path / "curve.json"
    run("grpo.py", "--curve", str(curve), *flags)
    return json.loads(curve.read_text())


def rewards(curve: list[dict[str, float]]) -> tuple[float, float]:
    """Of the first quarter, and of the last."""
    quarter = len(curve) // 4
    values = [facts["reward"] for facts in curve]
    return mean(values[:quarter]), mean(values[-quarter:])


@pytest.mark.timeout(300)
def test_the_reward_reaches_what_is_stated_and_the_first_step_is_on_policy(tmp_path: Path) -> None:
    curve = learn(tmp_path)
    assert curve[0]["reward"] < 0.05
    assert max(facts["reward"] for facts in curve[-3:]) > 0.9, curve
    assert max(facts["first_step_ratio_error"] for facts in curve) < 1e-4
    assert all(facts["epochs_behind"] == 0 for facts in curve)


@pytest.mark.timeout(300)
def test_without_updates_the_reward_stays_where_it_was(tmp_path: Path) -> None:
    first, last = rewards(learn(tmp_path, "--iterations", "6", "--no-updates"))
    assert last < 1.5 * first
    assert last < 0.05, "one token in 32 is right by chance"


@pytest.mark.timeout(300)
def test_a_trainer_process_updates_engines_in_the_middle_of_their_answers(tmp_path: Path) -> None:
    curve = learn(tmp_path, "--mode", "separate", "--iterations", "12")
    first, last = rewards(curve)
    assert last > 1.5 * first, curve
    assert max(facts["first_step_ratio_error"] for facts in curve) < 1e-4
    assert any(facts["epochs_behind"] > 0 for facts in curve)


@pytest.mark.timeout(300)
def test_partial_rollouts_go_on_under_the_next_weights(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "tiny")
    shown = run("partial_rollouts.py", "--model", str(model), "--num-tokens", "90")
    by_epoch = [
        [int(count) for count in re.findall(r": (\d+)[,}]", line)]
        for line in shown.splitlines()
        if "tokens by epoch" in line
    ]
    assert [sum(counts) for counts in by_epoch] == [90, 90, 90]
    assert all(len(counts) > 1 for counts in by_epoch)
