"""The paged KV cache: one tensor of keys and one of values a layer, made of blocks.

The layout `[num_blocks, block_size, kv_heads, head_dim]`, keys and values apart, serves the C
kernels, torch's indexing and FlashInfer's NHD pages alike. Which request owns which block is the
block pool's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from homing.engine.models import ModelShape

CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class KVCache:
    keys: list[Tensor]  # per layer [num_blocks, block_size, kv_heads, head_dim]
    values: list[Tensor]  # the same

    @classmethod
    def allocate(cls, shape: ModelShape, num_blocks: int, block_size: int) -> KVCache:
        """Zeros, so that the unused tail of a block is finite: 0 * NaN would spoil a masked sum."""
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        return cls(
            keys=[_lazy_zeros(size, shape.dtype) for _ in range(shape.num_layers)],
            values=[_lazy_zeros(size, shape.dtype) for _ in range(shape.num_layers)],
        )

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.keys[0].shape[1]


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system hands out as it is first written. torch.zeros writes all of it:
    seconds at start, and gigabytes that an idle rank does not need."""
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(size)


def block_bytes(shape: ModelShape, block_size: int) -> int:
    """Memory of one block: keys and values of `block_size` tokens in every layer."""
    values_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return values_per_token * block_size * shape.dtype.itemsize
