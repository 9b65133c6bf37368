"""Paged attention in plain torch, one request at a time: right on any machine, fast on none.

The context is cut into splits of `SPLIT_TOKENS` at fixed positions, and their results are merged
in order. Every matrix product then has the same shape but for its number of rows, so that a row's
bits depend on neither the other rows nor the length of their contexts. The C kernels cut and
merge at the same places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.kv_cache import read_slots

SPLIT_TOKENS = 128
ROW_MULTIPLE = (
    8  # as in models.llama: fewer rows would take another path through the matrix library
)


class TorchAttention:
    """See `homing.engine.attention.Attention`."""

    def plan(self, batch: Batch, block_size: int) -> None:
        """Nothing to prepare."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, window: int | None
    ) -> Tensor:
        return paged_attention(queries, keys, values, batch, window=window)


def paged_attention(
    queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, window: int | None
) -> Tensor:
    """Causal attention of each row [tokens, heads, head_dim] over its own request's context."""
    result = torch.empty_like(queries, dtype=torch.float32)
    for request in batch.request_index.unique().tolist():
        rows = torch.nonzero(batch.request_index == request).flatten()
        result[rows] = _attend(
            queries[rows].float(),
            keys,
            values,
            batch.positions[rows],
            batch.block_tables[request],
            window,
        )
    return result.to(queries.dtype)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    block_table: Tensor,
    window: int | None,
) -> Tensor:
    """Rows of one request. Inside, tensors are [kv_heads, rows * group, ...], rows padded."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    padding = -num_rows % ROW_MULTIPLE
    positions = F.pad(positions, (0, padding))
    queries = F.pad(queries, (0, 0, 0, 0, 0, padding)) * head_dim**-0.5
    queries = queries.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    first = torch.zeros_like(positions) if window is None else positions - window + 1
    group = num_heads // num_kv_heads

    best = torch.full((*queries.shape[:2], 1), -torch.inf, device=queries.device)
    total = torch.zeros_like(best)
    mixed = torch.zeros_like(queries)
    for start in range(0, int(positions.max()) + 1, SPLIT_TOKENS):
        tokens = torch.arange(start, start + SPLIT_TOKENS, device=queries.device)
        visible = (tokens >= first[:, None]) & (tokens <= positions[:, None])  # [rows, tokens]
        visible = visible.repeat_interleave(group, dim=0)
        split_keys, split_values = _gather(keys, values, block_table, tokens)
        scores = (queries @ split_keys.mT).masked_fill(~visible, -torch.inf)
        split_best = scores.amax(-1, keepdim=True)
        weights = torch.where(visible, torch.exp(scores - split_best), 0.0)
        split_total, split_mixed = weights.sum(-1, keepdim=True), weights @ split_values

        # A row that sees nothing of this split has weight 0 here, and its state stays as it is.
        new_best = torch.maximum(best, split_best)
        old_share = torch.where(best > -torch.inf, torch.exp(best - new_best), 0.0)
        new_share = torch.where(split_best > -torch.inf, torch.exp(split_best - new_best), 0.0)
        total = total * old_share + split_total * new_share
        mixed = mixed * old_share + split_mixed * new_share
        best = new_best
    mixed = (mixed / total).unflatten(1, (-1, group)).transpose(0, 1)
    return mixed.flatten(1, 2)[:num_rows]


def _gather(
    keys: Tensor, values: Tensor, block_table: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """One split, [kv_heads, tokens, head_dim] in fp32; beyond the table its last slot repeats."""
    block_size = keys.shape[1]
    last = block_table.shape[0] * block_size - 1
    tokens = tokens.clamp(max=last)
    slots = block_table[tokens // block_size] * block_size + tokens % block_size
    return (
        read_slots(keys, slots).transpose(0, 1),
        read_slots(values, slots).transpose(0, 1),
    )
