"""The largest values of a row, in one order for all: value descending, then id ascending."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

BLOCK = 256
"""Width of the pieces of a row that are summed or maximised on their own."""


def block_maxima(values: Tensor) -> Floats:
    """[rows, vocab // BLOCK], of whole blocks only: a short last one is left out."""
    if values.shape[-1] < BLOCK:
        return np.empty((len(values), 0), np.float32)
    return values.unfold(-1, BLOCK, BLOCK).amax(-1).numpy()


def largest(values: Floats, maxima: Floats, count: int) -> Ids:
    """The ids of the `count` largest of `values` [vocab], largest first, ties to the lowest id.

    `maxima`, the row's block maxima, spare a partial sort: `count` values at least are as large as
    the `count`-th largest maximum.
    """
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    if count <= len(maxima):
        floor = np.partition(maxima, -count)[-count]
    else:
        floor = np.partition(values, -count)[-count]
    return at_least(values, floor)[:count]


def at_least(values: Floats, floor: np.floating | float) -> Ids:
    """The ids of the values `>= floor`, largest first, ties to the lowest id."""
    ids = np.flatnonzero(values >= floor)
    return ids[np.argsort(-values[ids], kind="stable")]
