"""Suspects: requests that were at an engine when it died. One of them may be what it died of.

All but that one are innocent, and would be taken for guilty if they went on to the next engine
together and died there again. So a client lets its suspects go on one after the other: the next
when the last brought a token, or ended, or took too long. First goes who had brought none, the
oldest first: that is what an engine works on when it dies of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from homing.client.generation import Generation

PROBATION_S = 2.0
"""The longest that one suspect holds up the next: a long prompt takes its time."""


class Suspects:
    def __init__(self, resubmit: Callable[[Generation], None]) -> None:
        self._resubmit = resubmit
        self._waiting: dict[int, Generation] = {}  # request id -> suspect
        self._probed: Generation | None = None
        self._probed_since = 0.0

    def add(self, generation: Generation) -> None:
        """`release` lets it go on, sooner or later."""
        self._waiting[generation.request_id] = generation

    def release(self, now: float) -> None:
        """Let the next go on if it is time."""
        if self._probed is not None and now - self._probed_since < PROBATION_S:
            return
        self._probed = None
        if self._waiting:
            suspect = min(self._waiting.values(), key=_order)
            del self._waiting[suspect.request_id]
            self._probed, self._probed_since = suspect, now
            self._resubmit(suspect)

    def cleared(self, generation: Generation, now: float) -> None:
        """It brought a token, or ended."""
        self._waiting.pop(generation.request_id, None)
        if generation is self._probed:
            self._probed = None
            self.release(now)

    def forget_all(self) -> None:
        """Somebody else sees to it that they go on."""
        self._waiting.clear()
        self._probed = None


def _order(suspect: Generation) -> tuple[bool, int]:
    return suspect.num_resumed_tokens > 0, suspect.request_id
