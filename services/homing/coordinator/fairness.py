"""FairShares: who is refused first while the fleet is full, and when to come again. Pure.

Whoever comes first is served while there is room. But when somebody was refused for want of it,
then for a while no holder may have more than the fleet's places divided by the holders that claim
some: those that have places, and those that were refused. What a holder has beyond its share it
keeps; the next one that it asks for goes to somebody else.

A holder is a tenant, whichever clients submit for it, or a client that submits for none.
"""

from __future__ import annotations

from collections import deque

from homing.coordinator.records import Holder

CONTENTION_S = 5.0
"""For so long after a refusal for want of room, shares count."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
RECENT_S = 30.0
"""Ends older than this say nothing of how fast places become free."""
MAX_REFUSED = 4096
"""Holders without a place of which it is known that they were refused; the oldest go first."""


class FairShares:
    def __init__(self) -> None:
        self._num_held: dict[Holder, int] = {}  # places, of those that have any
        self._refused_at: dict[Holder, float] = {}  # of those that have none
        self.contended_until = 0.0
        """Until then shares count."""
        self._refusals: deque[float] = deque(maxlen=1024)
        self._ends: deque[float] = deque(maxlen=128)

    def num_held(self, holder: Holder) -> int:
        return self._num_held.get(holder, 0)

    @property
    def num_holders(self) -> int:
        """That have requests in flight."""
        return len(self._num_held)

    def took(self, holder: Holder) -> None:
        """It got a place."""
        self._num_held[holder] = self._num_held.get(holder, 0) + 1
        if self._refused_at:
            self._refused_at.pop(holder, None)

    def gave_back(self, holder: Holder, now: float | None) -> None:
        """A place became free; `now` unless that says nothing of how fast they do."""
        left = self._num_held.pop(holder) - 1
        if left:
            self._num_held[holder] = left
        if now is not None:
            self._ends.append(now)

    def refused(self, holder: Holder, now: float) -> None:
        """There was no place for it at all."""
        self.contended_until = now + CONTENTION_S
        self._refusals.append(now)
        if holder not in self._num_held:
            self._refused_at[holder] = now
            if len(self._refused_at) > MAX_REFUSED:
                del self._refused_at[next(iter(self._refused_at))]

    def forget(self, holder: Holder) -> None:
        self._refused_at.pop(holder, None)

    def share(self, num_places: int, now: float) -> int:
        """What one holder may have of the fleet's places while they are contended."""
        for holder, then in list(self._refused_at.items()):
            if now - then > CONTENTION_S:
                del self._refused_at[holder]
        claimants = max(1, self.num_holders + len(self._refused_at))
        return max(1, -(-num_places // claimants))

    def retry_after_s(self, now: float) -> float:
        """When there may be a place for one who is refused now, by the pace of the latest ends and
        by how many were refused in the last second."""
        while self._ends and now - self._ends[0] > RECENT_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return SHORTEST_RETRY_S
        seconds_an_end = (now - self._ends[0]) / len(self._ends)
        num_before = 1 + sum(now - then < 1.0 for then in self._refusals)
        return min(max(SHORTEST_RETRY_S, num_before * seconds_an_end), LONGEST_RETRY_S)
