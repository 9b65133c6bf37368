"""Sampling where the logits are: tokens alone come to the CPU.

FlashInfer cuts distributions to their top-k and top-p, and the draw is our own, by the one uniform
number of (seed, position). FlashInfer could draw, too, but its noise depends on a row's place in
the batch: a seed would mean nothing. Where no top-k and top-p is asked for, tokens are those of
`Sampler`, but for what rounding moves; with them the order of the candidates, and so the token of a
seed, is another.

What changes single rows, penalties and grammars, is computed on the CPU as in `Sampler`. Without
those, only the copy of the tokens waits for the logits: parameters are sent, and kernels queued,
while the step is still computed.

Written for flashinfer-python 0.5.3 to 0.7.4 (https://docs.flashinfer.ai/api/sampling.html); not yet
verified on hardware.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homing.engine.async_copies import sent
from homing.engine.models import ModelShape
from homing.engine.request import Request
from homing.engine.sampling.adjust import changed, changes_logits
from homing.engine.sampling.noise import uniform
from homing.engine.sampling.sampler import Sampler


class FlashInferSampler(Sampler):
    """Takes logits on a GPU. On a CPU its results are those that a GPU's would be."""

    def __init__(self) -> None:
        library: Any = importlib.import_module("flashinfer.sampling")
        self._top_k = _deterministic(library.top_k_renorm_probs)
        self._top_p = _deterministic(library.top_p_renorm_probs)

    def warm_up(self, shape: ModelShape) -> None:
        """Have the library compile what it cuts distributions with."""
        probs = torch.full((1, shape.vocab_size), 1 / shape.vocab_size, device=shape.device)
        _cut(probs, self._top_k, [0], torch.tensor([1], dtype=torch.int32))
        _cut(probs, self._top_p, [0], torch.tensor([0.5]))

    def sample_from_logits(
        self, logits: Tensor, requests: Sequence[Request]
    ) -> NDArray[np.integer]:
        logits = _adjusted(logits, requests)
        tokens = logits.argmax(-1)
        noisy = [row for row, request in enumerate(requests) if not request.greedy]
        if noisy:
            rows = sent(torch.tensor(noisy), logits.device)
            tokens[rows] = self._draw(logits[rows], [requests[row] for row in noisy])
        return tokens.cpu().numpy()

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        params = [request.sampling for request in requests]
        temperature = _column([p.temperature for p in params], logits)
        probs = torch.softmax(logits / temperature, dim=-1)
        vocab = logits.shape[-1]
        # Only rows that ask for it: what means no limit is at the edge of what the library takes.
        top_k = {row: p.top_k for row, p in enumerate(params) if 0 < p.top_k < vocab}
        _cut(probs, self._top_k, list(top_k), torch.tensor(list(top_k.values()), dtype=torch.int32))
        top_p = {row: p.top_p for row, p in enumerate(params) if 0.0 < p.top_p < 1.0}
        _cut(probs, self._top_p, list(top_p), torch.tensor(list(top_p.values())))
        if any(p.min_p for p in params):
            floor = probs.amax(-1, keepdim=True) * _column([p.min_p for p in params], logits)
            probs = torch.where(probs >= floor, probs, 0.0)
        return invert(probs, uniform([r.seed for r in requests], [r.num_tokens for r in requests]))


def _deterministic(renormalize: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Where the library can: else the order of its sums may move a token over the edge."""
    if "is_deterministic" in inspect.signature(renormalize).parameters:
        return partial(renormalize, is_deterministic=True)
    return renormalize


def _cut(
    probs: Tensor, renormalize: Callable[..., Tensor], rows: list[int], limits: Tensor
) -> None:
    if rows:
        index = sent(torch.tensor(rows), probs.device)
        probs[index] = renormalize(probs[index], sent(limits, probs.device))


def invert(probs: Tensor, noise: NDArray[np.float64]) -> Tensor:
    """For each row of `probs` [rows, vocab], which need not sum to 1, the token whose share of the
    total holds its number of `noise`, in [0, 1). Sums are fp64: their order does not matter."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = sent(torch.from_numpy(noise), probs.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(tokens, last).squeeze(-1)


def _adjusted(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    rows = [row for row, request in enumerate(requests) if changes_logits(request)]
    if not rows:
        return logits
    values = logits[rows].cpu().numpy()
    new = [changed(row, requests[index]) for row, index in zip(values, rows, strict=True)]
    result = logits.clone()  # log-probabilities are of the model's own logits
    result[rows] = torch.from_numpy(np.stack(new)).to(logits.device)
    return result


def _column(values: list[float], like: Tensor) -> Tensor:
    """[rows, 1]."""
    return sent(torch.tensor(values, dtype=torch.float32), like.device)[:, None]
