"""Log-probabilities of the model itself: the log-softmax of raw logits, in fp32."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homing.engine.log_probs import LogProbs
from homing.engine.sampling.ranking import block_maxima, largest

SLICE_ROWS = 8
"""Rows turned into log-probabilities at a time: the scores of a long prompt take 1.5 MB at a
vocabulary of 49,152, however many rows there are."""


def score(logits: Tensor, chosen: NDArray[np.integer], num_top: int) -> LogProbs:
    """Log-probabilities of `chosen` [rows] under `logits` [rows, vocab], and the `num_top` best."""
    num_top = min(num_top, logits.shape[-1])
    if logits.is_cuda:
        return score_on_device(logits, chosen, num_top)
    result = LogProbs(
        chosen=np.empty(len(chosen), np.float32),
        top_ids=np.empty((len(chosen), num_top), np.uint32),
        top=np.empty((len(chosen), num_top), np.float32),
    )
    for start in range(0, len(chosen), SLICE_ROWS):
        rows = slice(start, start + SLICE_ROWS)
        log_probs = torch.log_softmax(logits[rows], dim=-1)
        values = log_probs.numpy()
        result.chosen[rows] = values[np.arange(len(values)), chosen[rows]]
        if num_top:
            maxima = block_maxima(log_probs)
            for offset, row in enumerate(values):
                ids = largest(row, maxima[offset], num_top)
                result.top_ids[start + offset] = ids
                result.top[start + offset] = row[ids]
    return result


def score_on_device(logits: Tensor, chosen: NDArray[np.integer], num_top: int) -> LogProbs:
    """All rows at once, and nothing as wide as the vocabulary copied to the CPU. Which of equal
    log-probabilities is among the best is up to torch."""
    log_probs = torch.log_softmax(logits, dim=-1)
    ids = torch.from_numpy(chosen.astype(np.int64)).to(logits.device)
    top, top_ids = log_probs.topk(num_top, dim=-1)
    return LogProbs(
        chosen=log_probs.gather(-1, ids[:, None]).squeeze(-1).cpu().numpy(),
        top_ids=top_ids.cpu().numpy().astype(np.uint32),
        top=top.cpu().numpy(),
    )
