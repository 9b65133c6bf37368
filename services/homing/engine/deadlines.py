"""Deadlines of requests, by whatever clock the caller keeps."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from homing.engine.request import Phase, Request

MIN_SWEEP = 64


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = count()
        self._sweep_at = MIN_SWEEP

    def __len__(self) -> int:
        """Requests that are remembered; at most twice as many as are unfinished, beyond a few."""
        return len(self._heap)

    def add(self, request: Request, deadline: float) -> None:
        if len(self._heap) >= self._sweep_at:  # most end long before their deadline
            self._heap = [entry for entry in self._heap if entry[2].phase is not Phase.FINISHED]
            heapify(self._heap)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))
        heappush(self._heap, (deadline, next(self._order), request))

    def passed(self, now: float) -> list[Request]:
        """The unfinished requests whose deadline has passed; each is told once."""
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.phase is not Phase.FINISHED:
                late.append(request)
        return late
