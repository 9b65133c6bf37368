"""What a request does to its logits before a token is chosen: penalties, bias, barred tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from homing.engine.request import Request
from homing.engine.structured.grammar import GrammarState

BARRING_BIAS = -100.0
"""OpenAI's convention: a bias of -100 bars a token, whatever its logit."""


def adjusted(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """`logits` [rows, vocab] as each row's request wants them. The argument is left as it is."""
    rows = [i for i, r in enumerate(requests) if r.has_penalties or r.bars_stop_ids or r.grammar]
    if not rows:
        return logits
    result = logits.clone()
    values = result.numpy()
    for row in rows:
        _adjust(values[row], requests[row])
        if grammar := requests[row].grammar:
            _keep_what_fits(values[row], logits[row].numpy(), grammar)
    return result


def _adjust(row: NDArray[np.float32], request: Request) -> None:
    params = request.sampling
    if params.repetition_penalty != 1.0:
        _penalize_repetition(row, request.tokens, params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(request.generated, return_counts=True)
        row[ids] -= np.float32(params.presence_penalty)
        row[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    for token, bias in params.logit_bias.items():
        row[token] += np.float32(-np.inf if bias <= BARRING_BIAS else bias)
    if request.bars_stop_ids:
        row[list(request.stop_token_ids)] = -np.inf


def _keep_what_fits(
    row: NDArray[np.float32], logits: NDArray[np.float32], grammar: GrammarState
) -> None:
    """Bar what may not follow. Where bias and minimum length bar all the rest, they give way."""
    mask = np.empty(-(-len(row) // 32), np.uint32)
    grammar.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little")
    np.copyto(row, -np.inf, where=bits == 0)
    if row.max() == -np.inf:
        np.copyto(row, logits, where=bits != 0)


def _penalize_repetition(
    row: NDArray[np.float32], tokens: NDArray[np.int32], penalty: float
) -> None:
    """Keskar et al., 2019: divide positive logits, multiply negative ones."""
    ids = np.unique(tokens)
    logits = row[ids]
    factor = np.float32(penalty)
    row[ids] = np.where(logits > 0, logits / factor, logits * factor)
