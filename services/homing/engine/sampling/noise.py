"""The noise of sampling: one uniform number for each token, from a counter-based generator.

Keyed by (seed, position in the sequence) and nothing else, so that a request continues elsewhere as
if it had never been interrupted, and no batch changes it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014; constants by Stafford)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position). Seeds are signed 64-bit integers.

    The seed is mixed first: else one seed's sequence would be another's, shifted.
    """
    keys = _mix(np.array(seeds, np.int64).view(np.uint64) + _GOLDEN)
    bits = _mix(keys + np.array(positions, np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
