"""What a request does to its logits before a token is chosen: penalties, bias, barred tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from homing.engine.request import Request
from homing.engine.sampling.ranking import Floats
from homing.engine.structured.grammar import GrammarState

BARRING_BIAS = -100.0
"""OpenAI's convention: a bias of -100 bars a token, whatever its logit."""


def changes_logits(request: Request) -> bool:
    return request.has_penalties or request.bars_stop_ids or request.grammar is not None


def changed(logits: Floats, request: Request) -> Floats:
    """One row of logits [vocab] as its request wants it. The argument is left as it is."""
    row = logits.copy()
    _adjust(row, request)
    if request.grammar:
        _keep_what_fits(row, logits, request.grammar)
    return row


def _adjust(row: Floats, request: Request) -> None:
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


def _keep_what_fits(row: Floats, logits: Floats, grammar: GrammarState) -> None:
    """Bar what may not follow. Where bias and minimum length bar all the rest, they give way."""
    mask = np.empty(-(-len(row) // 32), np.uint32)
    grammar.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little")
    np.copyto(row, -np.inf, where=bits == 0)
    if row.max() == -np.inf:
        np.copyto(row, logits, where=bits != 0)


def _penalize_repetition(row: Floats, tokens: NDArray[np.int32], penalty: float) -> None:
    """Keskar et al., 2019: divide positive logits, multiply negative ones."""
    ids = np.unique(tokens)
    logits = row[ids]
    factor = np.float32(penalty)
    row[ids] = np.where(logits > 0, logits / factor, logits * factor)
