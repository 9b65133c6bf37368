"""Which tokens a row may become: top-k, then top-p of what is left, then min-p."""

from __future__ import annotations

import numpy as np

from homing.engine.sampling.ranking import Floats, Ids, at_least, largest
from homing.params import SamplingParams

LOOKS = (64, 1024)
"""Tokens ranked in search of a nucleus (top-p): most hold fewer than 64."""


def is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or _has_top_p(params) or params.min_p > 0.0


def candidates(probs: Floats, maxima: Floats, params: SamplingParams) -> Ids:
    """The ids that are kept of `probs` [vocab], most probable first, ties to the lowest id; never
    none.

    `maxima` are the row's block maxima.
    """
    if params.top_k:
        ids = largest(probs, maxima, params.top_k)
        if _has_top_p(params):
            ids = ids[
                : _nucleus_size(probs[ids], params.top_p, float(probs[ids].sum(dtype=np.float64)))
            ]
    elif _has_top_p(params):
        ids = _nucleus(probs, maxima, params.top_p)
    else:
        ids = at_least(probs, probs.max() * np.float32(params.min_p))
    if params.min_p:
        ids = ids[probs[ids] >= probs[ids[0]] * np.float32(params.min_p)]
    return ids


def _has_top_p(params: SamplingParams) -> bool:
    return 0.0 < params.top_p < 1.0


def _nucleus(probs: Floats, maxima: Floats, top_p: float) -> Ids:
    """The fewest tokens whose probability sums to `top_p`."""
    for count in LOOKS:
        ids = largest(probs, maxima, count)
        size = _nucleus_size(probs[ids], top_p, 1.0)
        if size <= len(ids):
            return ids[:size]
    # All tokens below this floor together have less than 1 - top_p, so the nucleus is above it.
    ids = at_least(probs, np.float32((1.0 - top_p) / len(probs)))
    return ids[: _nucleus_size(probs[ids], top_p, 1.0)]


def _nucleus_size(ranked: Floats, top_p: float, total: float) -> int:
    """How many of `ranked` reach `top_p` of `total`; more than there are, if they do not."""
    return int(ranked.cumsum(dtype=np.float64).searchsorted(top_p * total, side="left")) + 1
