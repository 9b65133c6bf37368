"""Histograms as plain counters, which can be added up over processes and only ever grow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

_LE = ".le."


class Histogram:
    """Counts values by the lowest bound that is not below them."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        """`bounds` rise; values beyond the last one are counted too."""
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def counters(self) -> dict[str, float]:
        """NAME.le.BOUND -> values up to the bound, NAME.sum, NAME.count."""
        cumulative = list(accumulate(self._counts))
        up_to = {
            f"{self._name}{_LE}{bound:g}": count
            for bound, count in zip(self._bounds, cumulative, strict=False)
        }
        return {
            **up_to,
            f"{self._name}.sum": self._sum,
            f"{self._name}.count": cumulative[-1],
        }


def read_histogram(
    name: str, counters: Mapping[str, float]
) -> tuple[list[tuple[str, float]], float]:
    """What `counters` of one or of many processes say: (bound, values up to it), ascending and with
    `+Inf` last; and the sum of all values. No buckets but the last if nothing was counted."""
    prefix = name + _LE
    bounds = sorted(
        (key.removeprefix(prefix) for key in counters if key.startswith(prefix)), key=float
    )
    buckets = [(bound, counters[prefix + bound]) for bound in bounds]
    return [*buckets, ("+Inf", counters.get(f"{name}.count", 0))], counters.get(f"{name}.sum", 0.0)
