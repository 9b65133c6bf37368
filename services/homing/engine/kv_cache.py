"""The paged KV cache: one tensor of keys and one of values a layer, made of blocks.

The layout `[num_blocks, block_size, kv_heads, head_dim]`, keys and values apart, serves the C
kernels, torch's indexing and FlashInfer's NHD pages alike. Which request owns which block is the
block pool's business.

An fp8 cache holds e4m3 as it is, at most 448. In an int8 one each head of each token has a scale of
its own, an fp32 behind its numbers: the last dimension is 4 bytes longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from homing.engine.models import ModelShape
from homing.errors import ConfigError

CACHE_LINE_BYTES = 64
SCALE_BYTES = 4

KV_DTYPES = {
    "auto": None,  # that of the weights, before they are quantized
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def kv_dtype_of(name: str) -> torch.dtype | None:
    """Raises ConfigError, in one line, for a name that there is not."""
    if name not in KV_DTYPES:
        names = ", ".join(KV_DTYPES)
        raise ConfigError(f"kv-cache-dtype {name!r} is not supported (supported: {names})")
    return KV_DTYPES[name]


@dataclass(frozen=True)
class KVCache:
    keys: list[Tensor]  # per layer [num_blocks, block_size, kv_heads, head_dim or more]
    values: list[Tensor]  # the same

    @classmethod
    def allocate(cls, shape: ModelShape, num_blocks: int, block_size: int) -> KVCache:
        """Zeros, so that the unused tail of a block is finite: 0 * NaN would spoil a masked sum."""
        size = (num_blocks, block_size, shape.num_kv_heads, _stored_head_dim(shape))

        def zeros() -> Tensor:
            if shape.device.type == "cpu":
                return _lazy_zeros(size, shape.cache_dtype)
            return torch.zeros(size, dtype=shape.cache_dtype, device=shape.device)

        return cls(
            keys=[zeros() for _ in range(shape.num_layers)],
            values=[zeros() for _ in range(shape.num_layers)],
        )

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.keys[0].shape[1]


def write_slots(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write rows `new` [tokens, kv_heads, head_dim] to flat slots of one tensor of a cache."""
    if cache.dtype == torch.int8:
        new = _with_scales(new.float())
    elif cache.dtype == torch.float8_e4m3fn:
        new = new.clamp(-448, 448).to(cache.dtype).view(torch.uint8)  # torch indexes no fp8
        cache = cache.view(torch.uint8)
    cache.flatten(0, 1)[slots] = new.to(cache.dtype)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows [tokens, kv_heads, head_dim] in fp32."""
    if cache.dtype == torch.float8_e4m3fn:
        rows = cache.view(torch.uint8).flatten(0, 1)[slots]
        return rows.view(torch.float8_e4m3fn).float()
    rows = cache.flatten(0, 1)[slots]
    if cache.dtype != torch.int8:
        return rows.float()
    numbers, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    return numbers.float() * scales.view(torch.float32)


def _with_scales(heads: Tensor) -> Tensor:
    """[tokens, kv_heads, head_dim] -> int8, each head followed by the bytes of its scale."""
    most = heads.abs().amax(-1, keepdim=True)
    numbers = (heads * torch.where(most > 0, 127 / most, 0.0)).round().to(torch.int8)
    return torch.cat([numbers, (most / 127).view(torch.int8)], dim=-1)


def _stored_head_dim(shape: ModelShape) -> int:
    return shape.head_dim + (SCALE_BYTES if shape.cache_dtype == torch.int8 else 0)


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system hands out as it is first written. torch.zeros writes all of it:
    seconds at start, and gigabytes that an idle rank does not need."""
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(size)


def block_bytes(shape: ModelShape, block_size: int) -> int:
    """Memory of one block: keys and values of `block_size` tokens in every layer."""
    values_per_token = 2 * shape.num_layers * shape.num_kv_heads * _stored_head_dim(shape)
    return values_per_token * block_size * shape.cache_dtype.itemsize
