"""The script that verifies the CUDA path: what it says without a GPU, and that its checks run, here
on stand-ins for FlashInfer and CUDA graphs."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from homing.bench import engine as engine_bench
from homing.bench.engine import Limits
from homing.engine.runner import Runner
from tests.gpu import check, checks
from tests.gpu.check import run_checks
from tests.gpu.checks import CHECKS, Setup
from tests.support import fake_flashinfer
from tests.support.tiny_models import make_tiny_model

SCRIPT = Path(__file__).parents[2] / "deploy" / "gpu_check.sh"


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    model = make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")
    return Setup(torch.device("cpu"), str(model), num_tokens=4, num_draws=500)


@pytest.mark.parametrize("name", list(CHECKS))
def test_a_check_passes_where_all_is_as_it_should_be(
    name: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.pretend(monkeypatch)
    monkeypatch.setattr(engine_bench, "measure_limits", lambda shape: Limits(10.0, 100.0))
    if name == "overlap":
        monkeypatch.setattr(Runner, "overlaps", True)
    if name == "engine":
        setup = replace(setup, num_tokens=20)  # so many that the cache is too small
    [result] = run_checks(setup, {name: CHECKS[name]})
    assert result["ok"], result["error"]
    assert result["measured"]
    json.dumps(result)


@pytest.mark.parametrize("name", ["attention", "texts"])
def test_a_check_fails_where_attention_is_wrong(
    name: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.pretend(monkeypatch)
    right = fake_flashinfer.PagedWrapper._attend

    def wrong(*arguments: Any) -> Tensor:
        return 0.9 * right(*arguments)

    monkeypatch.setattr(fake_flashinfer.PagedWrapper, "_attend", wrong)
    monkeypatch.setattr(checks, "SHAPES", checks.SHAPES[:1])
    [result] = run_checks(setup, {name: CHECKS[name]})
    assert not result["ok"]
    assert "AssertionError" in result["error"]


def test_checks_that_fail_do_not_stop_the_others_but_the_end_of_the_time_does(
    setup: Setup,
) -> None:
    def fail(setup: Setup) -> check.Measured:
        raise RuntimeError("no kernel")

    def overrun(setup: Setup) -> check.Measured:
        raise check.OutOfTime("the time is up")

    def passing(setup: Setup) -> check.Measured:
        return {"error": 0.0}

    checks = {"a": fail, "b": passing, "c": overrun, "d": passing}
    results = run_checks(setup, checks)
    assert [(result["name"], result["ok"]) for result in results] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
    assert results[0]["error"] == "RuntimeError: no kernel"


def test_without_a_gpu_the_checks_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report == {"ok": False, "error": f"torch {torch.__version__} finds no CUDA GPU"}


def test_without_a_gpu_the_script_fails_in_json_before_it_sets_anything_up(
    tmp_path: Path,
) -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    smi.chmod(0o755)
    before = (SCRIPT.parents[1] / ".venv-gpu").exists()
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    ran = subprocess.run(
        [str(SCRIPT)], capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False
    )
    assert ran.returncode == 1
    error = "there is no CUDA GPU here: nvidia-smi lists none"
    assert json.loads(ran.stdout) == {"ok": False, "error": error}
    assert (SCRIPT.parents[1] / ".venv-gpu").exists() == before
