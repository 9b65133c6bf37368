"""What the sources must not do, wherever it would be: each of these once brought a fleet down."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PORTIONS = (ROOT / "services" / "homing", ROOT / "shared" / "homing")
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
OBJECT_CALLS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object"}
MESSAGE_PATHS = ("coordinator", "engine", "frontend", "transport", "wire", "client")
PERIODIC = {"session.py": 1}
"""The client's heartbeat: it waits for the time to pass, not for a message."""


def modules(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    for portion in PORTIONS:
        for path in sorted(portion.rglob("*.py")):
            if not packages or path.relative_to(portion).parts[0] in packages:
                yield path, ast.parse(path.read_text())


def names_called(tree: ast.Module) -> list[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [getattr(call, "attr", getattr(call, "id", "")) for call in calls]


def imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_nothing_is_unpickled_anywhere() -> None:
    """Who can reach a socket that unpickles can run any code."""
    for path, tree in modules():
        assert not UNPICKLERS & imported(tree), path
        assert not OBJECT_CALLS & {*names_called(tree)}, path


def test_nobody_sleeps_to_wait_for_a_message() -> None:
    """A loop that polls with sleeps has their length for its latency."""
    for path, tree in modules(*MESSAGE_PATHS):
        assert names_called(tree).count("sleep") <= PERIODIC.get(path.name, 0), path


def test_the_coordinator_loads_no_tokenizer_and_no_model() -> None:
    """Whatever one loop does for all, it does not do for long."""
    heavy = {"torch", "transformers", "tokenizers", "jinja2", "numpy", "quart"}
    check = f"import sys, homing.coordinator.__main__; print({heavy} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
