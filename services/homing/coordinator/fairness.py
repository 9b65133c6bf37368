"""FairShares: who is refused first while the fleet is full, and when to come again. Pure.

Whoever comes first is served while there is room. But when a client was refused for want of it,
then for a while no client may hold more than the fleet's places divided by the clients that claim
some: those that hold places, and those that were refused. What a client holds beyond its share it
keeps; the next one that it asks for goes to somebody else.
"""

from __future__ import annotations

from collections import deque

from homing.coordinator.records import Client

CONTENTION_S = 5.0
"""For so long after a refusal for want of room, shares count."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
RECENT_S = 30.0
"""Ends older than this say nothing of how fast places become free."""


class FairShares:
    def __init__(self) -> None:
        self.num_holders = 0
        """Clients that have requests in flight."""
        self._refused_at: dict[Client, float] = {}  # of those that have none in flight
        self._contended_until = 0.0
        self._refusals: deque[float] = deque(maxlen=1024)
        self._ends: deque[float] = deque(maxlen=128)

    def took(self, client: Client) -> None:
        """A client got a place; call it after the place was entered."""
        if len(client.requests) == 1:
            self.num_holders += 1
            self._refused_at.pop(client, None)

    def gave_back(self, client: Client, now: float | None) -> None:
        """A place became free; `now` unless that says nothing of how fast they do."""
        self.num_holders -= not client.requests
        if now is not None:
            self._ends.append(now)

    def refused(self, client: Client, now: float) -> None:
        """There was no place for a client at all."""
        self._contended_until = now + CONTENTION_S
        self._refusals.append(now)
        if not client.requests:
            self._refused_at[client] = now

    def forget(self, client: Client) -> None:
        self._refused_at.pop(client, None)

    def is_contended(self, now: float) -> bool:
        return now < self._contended_until

    def share(self, num_places: int, now: float) -> int:
        """What one client may hold of the fleet's places while they are contended."""
        for client, then in list(self._refused_at.items()):
            if now - then > CONTENTION_S:
                del self._refused_at[client]
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
