"""When a process that has ended is started again, and when not. Pure; the clock is the caller's."""

from __future__ import annotations

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
# A process that has lived this long was healthy: its next failure counts as the first.
HEALTHY_AFTER_S = 60.0
# Deaths in a row, before the fleet was ever ready, that end the launch.
MAX_STARTS = 5


class Restarts:
    """How often one process has ended lately."""

    def __init__(self) -> None:
        self.failures = 0

    def record_exit(self, lived_s: float) -> float:
        """Count an exit; return the delay in seconds before the next start."""
        self.failures = 1 if lived_s >= HEALTHY_AFTER_S else self.failures + 1
        # 2**20 is past any cap; a bound on the exponent keeps a long outage from overflowing.
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.failures - 1, 20))
