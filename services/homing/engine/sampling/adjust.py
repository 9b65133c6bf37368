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
    if request.sampling.allowed_token_ids is not None:
        allowed = np.zeros(len(row), np.bool_)
        allowed[list(request.sampling.allowed_token_ids)] = True
        _keep(row, logits, allowed)
    if request.grammar:
        _keep(row, logits, _fitting(request.grammar, len(row)))
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
    if request.bad_words:
        row[request.bad_words.barred(request.generated.tolist())] = -np.inf


def _keep(row: Floats, logits: Floats, kept: NDArray[np.bool_]) -> None:
    """Bar all others. Where what was barred before leaves none of the kept ones, it gives way."""
    np.copyto(row, -np.inf, where=~kept)
    if row.max() == -np.inf:
        np.copyto(row, logits, where=kept)


def _fitting(grammar: GrammarState, vocab_size: int) -> NDArray[np.bool_]:
    """What may follow."""
    mask = np.empty(-(-vocab_size // 32), np.uint32)
    grammar.fill_mask(mask)
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _penalize_repetition(row: Floats, tokens: NDArray[np.int32], penalty: float) -> None:
    """Keskar et al., 2019: divide positive logits, multiply negative ones."""
    ids = np.unique(tokens)
    logits = row[ids]
    factor = np.float32(penalty)
    row[ids] = np.where(logits > 0, logits / factor, logits * factor)
