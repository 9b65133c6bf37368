"""Marks in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def may_start_at(text: str, marks: Sequence[str]) -> int:
    """Where the end of `text` may be the beginning of a mark; the length of `text` if nowhere."""
    longest = max(len(mark) for mark in marks) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)
