"""The paged KV cache: one tensor of keys and one of values a layer, made of blocks.

The layout `[num_blocks, block_size, kv_heads, head_dim]`, keys and values apart, serves the C kernels, torch's
indexing and FlashInfer's NHD pages alike. Which request owns which block is the block pool's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from homing.engine.models import ModelShape


@dataclass(frozen=True)
class KVCache:
    keys: list[Tensor]  # per layer [num_blocks, block_size, kv_heads, head_dim]
    values: list[Tensor]  # the same

    @classmethod
    def allocate(cls, shape: ModelShape, num_blocks: int, block_size: int) -> KVCache:
        """Zeros, so that the unused tail of a block is finite: 0 * NaN would spoil a masked sum."""
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        return cls(
            keys=[torch.zeros(size, dtype=shape.dtype) for _ in range(shape.num_layers)],
            values=[torch.zeros(size, dtype=shape.dtype) for _ in range(shape.num_layers)],
        )

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.keys[0].shape[1]


def block_bytes(shape: ModelShape, block_size: int) -> int:
    """Memory of one block: keys and values of `block_size` tokens in every layer."""
    values_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return values_per_token * block_size * shape.dtype.itemsize
