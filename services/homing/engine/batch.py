"""The index tensors of one step: what the model is told about the tokens it computes.

A batch is a flat list of rows, one a token. Decode rows and prefill chunks are the same thing: all keys
and values of a layer are written to the cache before any row attends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """All tensors are int32, contiguous, on the CPU.

    Row i computes token `token_ids[i]` at position `positions[i]`, writes its key and value to flat cache
    slot `slot_mapping[i]` = block id * block size + offset, and attends to positions `[0, positions[i]]`
    of the blocks in `block_tables[request_index[i]]`.
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slot_mapping: Tensor  # [tokens]
    request_index: Tensor  # [tokens]
    block_tables: Tensor  # [requests, max_blocks], padded with 0
    selected: Tensor  # [selected], rows whose logits are wanted, ascending
