"""The paged reference against attention written out for one request without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from homing.engine.attention.reference import paged_attention
from homing.engine.batch import Batch
from homing.engine.kv_cache import write_slots
from tests.support.batches import int32

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 16, 4


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None
) -> Tensor:
    """One row [heads, head_dim] over keys and values [tokens, kv_heads, head_dim]."""
    first = 0 if window is None else max(0, position - window + 1)
    group = NUM_HEADS // NUM_KV_HEADS
    keys = keys[first : position + 1].repeat_interleave(group, dim=1)
    values = values[first : position + 1].repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,thd->ht", queries, keys) * HEAD_DIM**-0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("window", [None, 5, 200])
def test_rows_of_several_requests_attend_to_their_own_context(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = (300, 7)
    blocks_each = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.randperm(2 * blocks_each).view(2, -1).int()
    cache = torch.zeros(2, 2 * blocks_each, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    contexts = []
    for request, length in enumerate(lengths):
        keys, values = torch.randn(2, length, NUM_KV_HEADS, HEAD_DIM)
        positions = torch.arange(length)
        slots = tables[request, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        write_slots(cache[0], keys, slots)
        write_slots(cache[1], values, slots)
        contexts.append((keys, values))
    rows = [(0, 298), (1, 6), (0, 299), (1, 0)]  # request, position
    queries = torch.randn(len(rows), NUM_HEADS, HEAD_DIM)
    unused = int32([0] * len(rows))
    batch = Batch(
        token_ids=unused,
        positions=int32([position for _, position in rows]),
        slot_mapping=unused,
        request_index=int32([request for request, _ in rows]),
        block_tables=tables,
        selected=unused,
    )
    result = paged_attention(queries, cache[0], cache[1], batch, window=window)
    for row, (request, position) in enumerate(rows):
        keys, values = contexts[request]
        expected = plain_attention(queries[row], keys, values, position, window)
        torch.testing.assert_close(result[row], expected)
