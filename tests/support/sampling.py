"""Requests that sample, many draws of one, and the distribution that they should have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from homing.engine.request import Request
from homing.engine.sampling import Sampler
from homing.params import SamplingParams

VOCAB = 1000  # neither a multiple of the block width, nor below it

DISTRIBUTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=7),
    SamplingParams(top_k=300),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.999, temperature=2.0),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=50, top_p=0.9, min_p=0.02, temperature=1.3),
]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def request(
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    generated: Sequence[int] = (),
    stop_token_ids: frozenset[int] = frozenset(),
) -> Request:
    made = Request(
        "r",
        np.array(prompt, np.int32),
        params,
        seed=seed,
        block_size=16,
        max_new_tokens=len(generated) + 100,
        stop_token_ids=stop_token_ids,
    )
    for token in generated:
        made.append(token)
    return made


def draws(
    logits: Tensor, params: SamplingParams, count: int = 4000, sampler: Sampler | None = None
) -> np.ndarray:
    """[vocab]: how often each token was drawn from one row, each time under another seed."""
    sample = (sampler or Sampler()).sample
    counts = np.zeros(logits.shape[-1], np.int64)
    rows = logits.expand(500, -1).contiguous()
    for start in range(0, count, 500):
        requests = [request(params, seed=start + i) for i in range(500)]
        np.add.at(counts, sample(rows, requests).token_ids, 1)
    return counts


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Standard deviations by which the statistic exceeds its mean; rare tokens are pooled."""
    expected = probs * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    statistic = float((((observed - wanted)[keep] ** 2) / wanted[keep]).sum())
    degrees = int(keep.sum()) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def truncated(probs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that `params` describe, computed the plain way."""
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    if 0 < params.top_p < 1:
        ranked = probs[order].astype(np.float64) / probs[order].sum(dtype=np.float64)
        order = order[: int(np.searchsorted(ranked.cumsum(), params.top_p)) + 1]
    order = order[probs[order] >= params.min_p * probs.max()]
    kept = np.zeros(len(probs))
    kept[order] = probs[order]
    return kept / kept.sum()
