"""docs/robustness.md names tests: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_is_named_in_the_list_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "robustness.md").read_text()))
    defined: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(named) > 50
    assert named <= defined
