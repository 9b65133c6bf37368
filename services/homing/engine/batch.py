"""The index tensors of one step: what the model is told about the tokens it computes.

A batch is a flat list of rows, one a token. Decode rows and prefill chunks are the same thing: all
keys and values of a layer are written to the cache before any row attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from homing.engine.block_pool import SCRATCH_BLOCK
from homing.engine.plan import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """All tensors are int32, contiguous, and on the CPU until `to` copies them.

    Row i computes token `token_ids[i]` at position `positions[i]`, writes its key and value to flat
    cache slot `slot_mapping[i]` = block id * block size + offset, and attends to positions `[0,
    positions[i]]` of the blocks in `block_tables[request_index[i]]`.
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slot_mapping: Tensor  # [tokens]
    request_index: Tensor  # [tokens]
    block_tables: Tensor  # [requests, max_blocks], padded with 0
    selected: Tensor  # [selected], rows whose logits are wanted, ascending

    def to(self, device: torch.device) -> Batch:
        """On a device; itself if it is there."""
        if self.positions.device == device:
            return self
        return Batch(
            self.token_ids.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            self.slot_mapping.to(device, non_blocking=True),
            self.request_index.to(device, non_blocking=True),
            self.block_tables.to(device, non_blocking=True),
            self.selected.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the requests of some chunks have their keys and values; a row for each chunk."""

    block_tables: np.ndarray  # int32 [chunks, max_blocks], padded with 0
    num_shared: np.ndarray  # int32 [chunks], tokens in blocks found in the cache

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Placement:
        """As it is now: a copy."""
        num_shared = [chunk.request.num_shared_tokens for chunk in chunks]
        return cls(_block_tables(chunks), np.array(num_shared, np.int32))

    def with_blocks(self, rows: list[int], columns: list[int], blocks: list[int]) -> Placement:
        """With these entries of the block tables, which may be wider by them."""
        if not rows:
            return self
        num_requests, width = self.block_tables.shape
        tables = np.zeros((num_requests, max(width, max(columns) + 1)), np.int32)
        tables[:, :width] = self.block_tables
        tables[rows, columns] = blocks
        return Placement(tables, self.num_shared)

    def equals(self, other: Placement) -> bool:
        """Since 0 is nobody's block, equal tables are of equal numbers of blocks."""
        return np.array_equal(self.block_tables, other.block_tables) and np.array_equal(
            self.num_shared, other.num_shared
        )


def build_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """One row for each token of each chunk, in order."""
    return replace(lay_out(chunks, Placement.of(chunks), block_size), token_ids=token_ids(chunks))


def token_ids(chunks: Sequence[Chunk]) -> Tensor:
    tokens = [chunk.request.tokens[chunk.start : chunk.end] for chunk in chunks]
    return torch.from_numpy(np.concatenate(tokens))


def lay_out(chunks: Sequence[Chunk], placement: Placement, block_size: int) -> Batch:
    """A batch whose token ids are 0. Of the requests themselves it looks at nothing, so it can be
    had before their tokens are known.

    A row whose position lies in a block found in the cache has its key and value there already: it
    writes to the scratch block instead, so that shared blocks are only ever read.
    """
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    lengths = np.array([chunk.end for chunk in chunks], np.int32) - starts
    row_starts = np.cumsum(lengths, dtype=np.int32) - lengths
    request_index = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    positions = np.arange(lengths.sum(), dtype=np.int32) + (starts - row_starts)[request_index]
    blocks = placement.block_tables[request_index, positions // block_size]
    blocks[positions < placement.num_shared[request_index]] = SCRATCH_BLOCK
    slots = blocks * np.int32(block_size) + positions % np.int32(block_size)
    return Batch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        request_index=torch.from_numpy(request_index),
        block_tables=torch.from_numpy(placement.block_tables),
        selected=torch.from_numpy(_selected(chunks, row_starts)),
    )


def _block_tables(chunks: Sequence[Chunk]) -> np.ndarray:
    tables = np.zeros((len(chunks), max(chunk.request.num_blocks for chunk in chunks)), np.int32)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: chunk.request.num_blocks] = chunk.request.blocks
    return tables


def _selected(chunks: Sequence[Chunk], row_starts: np.ndarray) -> np.ndarray:
    rows: list[int] = []
    for chunk, row_start in zip(chunks, row_starts.tolist(), strict=True):
        to_row = row_start - chunk.start
        rows += range(chunk.scored.start + to_row, chunk.scored.stop + to_row)
        if chunk.samples:
            rows.append(chunk.end - 1 + to_row)
    return np.array(rows, np.int32)
