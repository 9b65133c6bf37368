"""A runner that stands for one on a GPU: it overlaps, whatever its model's device says."""

from __future__ import annotations

from homing.engine.runner import Runner


class OverlappingRunner(Runner):
    @property
    def overlaps(self) -> bool:
        return True
