"""FleetHealth: which ranks get new work, by what they did lately. Pure: no clock, no I/O.

Each rank has a circuit breaker, which outlives the rank's processes:

    CLOSED     takes requests
    OPEN       failed too often: takes none until a backoff is over
    HALF_OPEN  takes one request at a time, to probe it: the first that it finishes closes the
               breaker, another failure opens it for twice as long

A rank whose heartbeats are late takes none until it is heard again. One whose steps take far longer
than the others' takes so much less than they have, until they are clearly shorter again. None of
this ever bars the whole fleet: where no rank would be left, each takes what it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low
from typing import NamedTuple

from homing.coordinator.records import RankId

MAX_FAILURES = 3
"""So many within `WINDOW_S` open a breaker."""
WINDOW_S = 60.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0

LATE_SHARE = 0.4
"""A rank that was silent for this share of the time after which it counts as dead is late."""
SLOW_FACTOR = 3.0
"""A rank whose steps take so many times as long as the median rank's is slow."""
RECOVERED_FACTOR = 2.0
"""A slow rank is so until its steps take less than so many times as long: one that wavers about a
single threshold would be given its full load and relieved of it in turn."""


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class CircuitEvent(StrEnum):
    TRIPPED = "tripped"  # it failed too often, or while it was probed
    WAITED = "waited"  # its backoff is over
    SERVED = "served"  # it finished a request


_C, _E = Circuit, CircuitEvent
TRANSITIONS: dict[tuple[Circuit, CircuitEvent], Circuit] = {
    (_C.CLOSED, _E.TRIPPED): _C.OPEN,
    (_C.OPEN, _E.TRIPPED): _C.OPEN,
    (_C.HALF_OPEN, _E.TRIPPED): _C.OPEN,
    (_C.OPEN, _E.WAITED): _C.HALF_OPEN,
    (_C.HALF_OPEN, _E.SERVED): _C.CLOSED,
    (_C.CLOSED, _E.SERVED): _C.CLOSED,
    (_C.OPEN, _E.SERVED): _C.OPEN,  # what it had before it was barred
}


@dataclass(slots=True)
class Breaker:
    circuit: Circuit = Circuit.CLOSED
    opened_until: float = 0.0
    backoff_s: float = 0.0
    """Of the last opening; 0 after it was closed."""
    failed_at: list[float] = field(default_factory=list[float])
    """Within the last `WINDOW_S`."""

    def fail(self, now: float) -> None:
        self.failed_at = [then for then in self.failed_at if now - then < WINDOW_S] + [now]
        if self.circuit is not Circuit.CLOSED or len(self.failed_at) >= MAX_FAILURES:
            self._move(CircuitEvent.TRIPPED)
            self.backoff_s = min(max(FIRST_BACKOFF_S, 2 * self.backoff_s), LONGEST_BACKOFF_S)
            self.opened_until = now + self.backoff_s

    def serve(self) -> None:
        if self.circuit is Circuit.HALF_OPEN:
            self.failed_at, self.backoff_s = [], 0.0
        self._move(CircuitEvent.SERVED)

    def wait(self, now: float) -> None:
        if self.circuit is Circuit.OPEN and now >= self.opened_until:
            self._move(CircuitEvent.WAITED)

    def _move(self, event: CircuitEvent) -> None:
        self.circuit = TRANSITIONS[self.circuit, event]


class RankSigns(NamedTuple):
    """What is seen of a live rank now."""

    silent_s: float
    slowness: float
    """How many times as long its steps take as the model of all ranks says."""
    leaving: bool = False
    """It drains: it takes nothing, whatever becomes of the others."""


class FleetHealth:
    def __init__(self, *, max_requests: int, timeout_s: float) -> None:
        """max_requests: a healthy rank may have; timeout_s: of silence, before a rank is dead."""
        self._max_requests = max_requests
        self._late_s = LATE_SHARE * timeout_s
        self.breakers: dict[RankId, Breaker] = {}
        """Of ranks that ever failed."""
        self._slow: set[RankId] = set()

    def circuit(self, rank: RankId) -> Circuit:
        breaker = self.breakers.get(rank)
        return breaker.circuit if breaker else Circuit.CLOSED

    def fail(self, rank: RankId, now: float) -> None:
        """A rank died, was given up, or had to begin anew."""
        self.breakers.setdefault(rank, Breaker()).fail(now)

    def serve(self, rank: RankId) -> bool:
        """A rank that ever failed finished a request; True if that closed its breaker."""
        breaker = self.breakers[rank]
        was_probed = breaker.circuit is Circuit.HALF_OPEN
        breaker.serve()
        return was_probed

    def limits(
        self, signs: Mapping[RankId, RankSigns], mean_requests: float, now: float
    ) -> dict[RankId, int]:
        """How many requests each of the live ranks may have; `mean_requests` is what they have."""
        for breaker in self.breakers.values():
            breaker.wait(now)
        usual = median_low([s.slowness for s in signs.values()]) if signs else 1.0
        slowness = {rank: sign.slowness / usual for rank, sign in signs.items()}
        self._slow = {rank for rank in signs if self._is_slow(rank, slowness[rank])}
        limits = {
            rank: self._limit(rank, sign, slowness[rank], mean_requests)
            for rank, sign in signs.items()
        }
        if not any(limits.values()):
            limits = {r: 0 if sign.leaving else self._max_requests for r, sign in signs.items()}
        return limits

    def _is_slow(self, rank: RankId, slowness: float) -> bool:
        return slowness >= (RECOVERED_FACTOR if rank in self._slow else SLOW_FACTOR)

    def _limit(self, rank: RankId, sign: RankSigns, slowness: float, mean_requests: float) -> int:
        circuit = self.circuit(rank)
        if sign.leaving or sign.silent_s > self._late_s or circuit is Circuit.OPEN:
            return 0
        if circuit is Circuit.HALF_OPEN:
            return 1
        if rank in self._slow:
            return min(self._max_requests, max(1, int(mean_requests / slowness)))
        return self._max_requests
