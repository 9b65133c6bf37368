"""Deadlines of requests, by whatever clock the caller keeps."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from homing.engine.request import Phase, Request


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = count()

    def add(self, request: Request, deadline: float) -> None:
        heappush(self._heap, (deadline, next(self._order), request))

    def passed(self, now: float) -> list[Request]:
        """The unfinished requests whose deadline has passed; each is told once."""
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.phase is not Phase.FINISHED:
                late.append(request)
        return late
