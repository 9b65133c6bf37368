"""Which pages of the KV cache a step's requests read: the index arrays that FlashInfer plans with.

Compressed rows, as in a sparse matrix. Three requests that compute 1, 3 and 1 tokens, with contexts
of 5, 3 and 8 tokens, in pages of 4:

    qo_indptr      0  1  4  5      rows [0, 1), [1, 4), [4, 5)
    kv_indptr      0  2  3  5      pages [0, 2), [2, 3), [3, 5) of:
    kv_indices     7 3 | 9 | 4 1   block ids
    last_page_len  1  3  4         tokens of each request's last page

A context ends with the last token that the step computes: its key and value are written before any
row attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.block_pool import SCRATCH_BLOCK


@dataclass(frozen=True, slots=True)
class Pages:
    """int32, on the CPU: FlashInfer plans there, and copies what its kernels need."""

    qo_indptr: Tensor  # [requests + 1]
    kv_indptr: Tensor  # [requests + 1]
    kv_indices: Tensor  # [pages]
    last_page_len: Tensor  # [requests], 1 to block size
    block_size: int

    @property
    def num_requests(self) -> int:
        return len(self.last_page_len)

    @property
    def is_decode(self) -> bool:
        """Each request has one row."""
        return int(self.qo_indptr[-1]) == self.num_requests


def pages_of(batch: Batch, block_size: int) -> Pages:
    """Of the requests that have rows in the batch, in the order of these."""
    request_index, positions = batch.request_index.numpy(), batch.positions.numpy()
    starts = np.flatnonzero(np.diff(request_index, prepend=-1))
    ends = np.append(starts[1:], len(request_index))
    context = positions[ends - 1] + 1
    num_pages = -(-context // block_size)
    tables = batch.block_tables.numpy()[request_index[starts]]
    is_read = np.arange(tables.shape[1]) < num_pages[:, None]
    return Pages(
        qo_indptr=_int32(np.append(starts, len(request_index))),
        kv_indptr=_int32(np.append(0, num_pages.cumsum())),
        kv_indices=_int32(tables[is_read]),
        last_page_len=_int32(context - (num_pages - 1) * block_size),
        block_size=block_size,
    )


def padded(batch: Batch, num_rows: int, block_size: int) -> Batch:
    """A batch of decodes with rows added that compute token 0 at position 0 of the scratch block:
    nobody reads what they write there."""
    more = num_rows - len(batch.token_ids)
    assert more >= 0
    fill: Mapping[str, int] = {"slot_mapping": SCRATCH_BLOCK * block_size}
    rows = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, more), value=fill.get(name, 0))
        for name in ("token_ids", "positions", "slot_mapping")
    }
    tables = torch.nn.functional.pad(batch.block_tables, (0, 0, 0, more), value=SCRATCH_BLOCK)
    every = torch.arange(num_rows, dtype=torch.int32)
    return Batch(**rows, request_index=every, block_tables=tables, selected=every)


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
