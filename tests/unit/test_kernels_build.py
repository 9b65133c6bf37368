"""Compiling the C kernels: once a machine, safely, and what happens where that is impossible."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from homing.engine import weights
from homing.engine.kernels import build
from homing.engine.kernels.build import load_library
from homing.engine.models.llama import TorchDecoder
from homing.engine.weights import ModelFiles, load_model
from homing.native import COMPILERS, NoCompiler, build_key
from tests.support.backends import CACHE_DIR
from tests.support.batches import Driver
from tests.support.tiny_models import make_tiny_model

LIBRARY = "decoder.so"

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")


def quick_compiler(directory: Path) -> str:
    """A stand-in for a compiler, its path: notes each run and copies a library built before."""
    load_library(CACHE_DIR)
    key = build_key(build.SOURCE.parent.iterdir(), build.FLAGS)
    built = CACHE_DIR / "kernels" / key / LIBRARY
    script = directory / "quick-cc"
    script.write_text(
        "#!/bin/sh\n"
        f"echo run >> {directory}/runs\n"
        'while [ "$1" != "-o" ]; do shift; done\n'
        f'cp {built} "$2"\n'
    )
    script.chmod(0o755)
    return str(script)


@needs_compiler
def test_the_library_is_built_once(tmp_path: Path) -> None:
    compilers = (quick_compiler(tmp_path),)
    for _ in range(3):
        assert load_library(tmp_path / "cache", compilers=compilers).run_step
    assert (tmp_path / "runs").read_text() == "run\n"
    assert len(list((tmp_path / "cache").rglob(LIBRARY))) == 1


@needs_compiler
def test_other_flags_are_another_library(tmp_path: Path) -> None:
    compilers = (quick_compiler(tmp_path),)
    load_library(tmp_path / "cache", compilers=compilers)
    load_library(tmp_path / "cache", compilers=compilers, extra_flags=("-DOTHER",))
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
    assert len(list((tmp_path / "cache").rglob(LIBRARY))) == 2


def test_without_a_compiler_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(NoCompiler, match="none of no-such-cc is installed"):
        load_library(tmp_path, compilers=("no-such-cc",))


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    failing = tmp_path / "failing-cc"
    failing.write_text("#!/bin/sh\necho 'unknown option' >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(NoCompiler, match=r"failing-cc cannot build decoder\.c: unknown option"):
        load_library(tmp_path / "cache", compilers=(str(failing),))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"][1:]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("printf '\\351chec' >&2; exit 1", "chec"),  # Latin-1
        ("exit 0", "built nothing of decoder.c"),
    ],
)
def test_whatever_a_compiler_says_or_leaves_out_is_a_reason(
    tmp_path: Path, script: str, reason: str
) -> None:
    odd = tmp_path / "odd-cc"
    odd.write_text(f"#!/bin/sh\n{script}\n")
    odd.chmod(0o755)
    with pytest.raises(NoCompiler, match=re.escape(reason)):
        load_library(tmp_path / "cache", compilers=(str(odd),))
    assert not list((tmp_path / "cache" / "kernels").glob("*[!k]"))  # but for the lock


def test_a_model_runs_in_torch_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_library(cache_dir: Path) -> None:
        raise NoCompiler("none of cc is installed")

    monkeypatch.setattr(weights, "load_library", no_library)
    files = ModelFiles("tiny", make_tiny_model("llama", tmp_path))
    with caplog.at_level(logging.WARNING):
        model = load_model(files, on_progress=lambda line: None)
    assert isinstance(model, TorchDecoder)
    assert caplog.messages == ["running the slow torch path: none of cc is installed"]
    assert Driver(model).greedy([5, 6, 7], 4)


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86-64")
def test_the_code_is_right_without_this_cpus_vector_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain SSE2 build has other rounding (no FMA), but must give the same model."""
    directory = make_tiny_model("qwen3", tmp_path / "model")
    files = ModelFiles("tiny", directory)
    tokens = list(range(10, 210))

    def logits_of(quantization: str | None, cache_dir: Path) -> torch.Tensor:
        model = load_model(
            files,
            dtype="fp32",
            quantization=quantization,
            cache_dir=cache_dir,
            on_progress=lambda line: None,
        )
        return Driver(model).step({0: tokens})

    def logits(cache_dir: Path) -> torch.Tensor:
        return torch.stack([logits_of(name, cache_dir) for name in (None, "int8", "int4", "fp8")])

    native = logits(CACHE_DIR)
    changes = {"-march=native": "-march=x86-64", "-O3": "-O1"}
    plain = tuple(changes.get(flag, flag) for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", plain)
    baseline = logits(tmp_path)
    torch.testing.assert_close(baseline[0], native[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(baseline, native, atol=1e-3, rtol=0)
