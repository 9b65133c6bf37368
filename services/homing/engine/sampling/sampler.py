"""Chooses a token for each row: greedily, or by one uniform number and the inverse of the
cumulative distribution, taken in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homing.engine.log_probs import LogProbs
from homing.engine.request import Request
from homing.engine.sampling.adjust import changed, changes_logits
from homing.engine.sampling.noise import uniform
from homing.engine.sampling.ranking import BLOCK, block_maxima
from homing.engine.sampling.scoring import score
from homing.engine.sampling.truncation import candidates, is_truncated

SLICE_ROWS = 8
"""Rows copied and worked on at a time: copies of all rows of a large batch would go back to the
system after each step, and getting their pages again costs more than the arithmetic."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each row of logits."""

    token_ids: list[int]
    log_probs: list[LogProbs | None]  # of one position each; None where they were not asked for


class Sampler:
    """Chooses the next token of each request. Override `sample_from_logits` to choose otherwise."""

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> Sampled:
        """The tokens, and the log-probabilities that were asked for."""
        tokens = self.sample_from_logits(logits, requests)
        return Sampled(tokens.tolist(), _log_probs(logits, tokens, requests))

    def sample_from_logits(
        self, logits: Tensor, requests: Sequence[Request]
    ) -> NDArray[np.integer]:
        """One token id [rows] for each request, given its row of `logits` [rows, vocab] (fp32, on
        the model's device).

        For results that depend neither on the batch nor on the rank, let a row's token follow from
        its logits and its request alone; noise from the request's seed and number of tokens.
        """
        return choose(logits, requests)


def choose(logits: Tensor, requests: Sequence[Request]) -> NDArray[np.intp]:
    """The tokens that the requests' parameters ask for; arguments as in `sample_from_logits`."""
    logits = logits.cpu()
    tokens = np.empty(len(requests), np.intp)
    values = logits.numpy()
    noisy: list[int] = []
    for row, request in enumerate(requests):
        if not request.greedy:
            noisy.append(row)
        elif changes_logits(request):
            tokens[row] = changed(values[row], request).argmax()
        else:
            tokens[row] = values[row].argmax()  # ties to the lowest id
    for start in range(0, len(noisy), SLICE_ROWS):
        rows = noisy[start : start + SLICE_ROWS]
        tokens[rows] = _draw(logits[rows], [requests[row] for row in rows])
    return tokens


def _draw(logits: Tensor, requests: Sequence[Request]) -> NDArray[np.intp]:
    """Tokens drawn at random; `logits` is overwritten."""
    values = logits.numpy()
    for row, request in enumerate(requests):
        if changes_logits(request):
            values[row] = changed(values[row], request)
    logits /= torch.tensor([r.sampling.temperature for r in requests])[:, None]
    probs = torch.softmax(logits, dim=-1)
    noise = uniform([r.seed for r in requests], [r.num_tokens for r in requests])
    tokens = np.empty(len(requests), np.intp)
    whole = [row for row, r in enumerate(requests) if not is_truncated(r.sampling)]
    cut = [row for row, r in enumerate(requests) if is_truncated(r.sampling)]
    if whole:
        tokens[whole] = _draw_from_all(probs[whole] if cut else probs, noise[whole])
    if cut:
        maxima = block_maxima(probs)
        for row in cut:
            row_probs = probs[row].numpy()
            ids = candidates(row_probs, maxima[row], requests[row].sampling)
            tokens[row] = ids[_invert(row_probs[ids], noise[row])]
    return tokens


def _draw_from_all(probs: Tensor, noise: NDArray[np.float64]) -> NDArray[np.intp]:
    """Ids in ascending order; sums of blocks first, then within the one block that is hit."""
    num_whole = probs.shape[-1] // BLOCK
    values = probs.numpy()
    sums = np.zeros((len(values), num_whole + 1), np.float32)
    sums[:, num_whole] = values[:, num_whole * BLOCK :].sum(-1)
    if num_whole:
        # numpy's sum of a contiguous block does not depend on how many there are.
        sums[:, :num_whole] = probs.unfold(-1, BLOCK, BLOCK).numpy().sum(-1)
    tokens = np.empty(len(values), np.intp)
    for row, block_sums in enumerate(sums):
        cumulative = block_sums.cumsum(dtype=np.float64)
        target = noise[row] * cumulative[-1]
        block = _first_above(cumulative, target)
        inside = values[row, block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
        before = cumulative[block - 1] if block else 0.0
        tokens[row] = block * BLOCK + _first_above(inside, target - before)
    return tokens


def _invert(probs: NDArray[np.float32], noise: float) -> int:
    """The index whose share of the total of `probs` holds `noise` in [0, 1)."""
    cumulative = probs.cumsum(dtype=np.float64)
    return _first_above(cumulative, noise * cumulative[-1])


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """The first index whose cumulative sum exceeds `target`; if rounding left none, the last one
    that has any probability."""
    index = cumulative.searchsorted(target, side="right")
    return int(min(index, cumulative.searchsorted(cumulative[-1], side="left")))


def _log_probs(
    logits: Tensor, tokens: NDArray[np.integer], requests: Sequence[Request]
) -> list[LogProbs | None]:
    result: list[LogProbs | None] = [None] * len(requests)
    rows = [row for row, r in enumerate(requests) if r.sampling.return_log_probs]
    if rows:
        num_top = [requests[row].sampling.top_n_logprobs for row in rows]
        scores = score(
            logits[rows] if len(rows) < len(requests) else logits, tokens[rows], max(num_top)
        )
        for index, row in enumerate(rows):
            result[row] = scores.row(index, num_top[index])
    return result
