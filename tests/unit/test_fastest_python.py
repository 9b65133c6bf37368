"""Which interpreter `make` sets the environment up with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy" / "fastest_python.py"
VERSION = "{} {}".format(*sys.version_info[:2])


UNFIT = ["exit 3", 'echo "$0" 3 9 0.000001', f'echo "$0" {VERSION} None', "echo garbage"]


def chosen(*folders: Path) -> str:
    result = subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "PATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.strip()


def interpreter(folder: Path, answer: str) -> Path:
    """A stand-in on a PATH of its own, that gives this answer when it is asked what it is."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_the_fastest_of_this_version_is_chosen(tmp_path: Path) -> None:
    fast = interpreter(tmp_path / "fast", f'echo "$0" {VERSION} 0.000001')
    assert chosen(fast.parent) == os.path.realpath(fast)


def test_what_is_broken_or_of_another_version_or_makes_no_environments_is_not(
    tmp_path: Path,
) -> None:
    unfit = [interpreter(tmp_path / str(i), answer).parent for i, answer in enumerate(UNFIT)]
    assert chosen(*unfit) == os.path.realpath(sys.executable)
