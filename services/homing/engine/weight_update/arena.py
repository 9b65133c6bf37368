"""Memory for all tensors of an update: one block, which goes back to the system with them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # of each tensor: a cache line


class Arena:
    """Takes memory as it is first written, so it may be made larger than what is needed."""

    def __init__(self, num_bytes: int) -> None:
        # numpy asks the system for huge pages, torch does not. With ordinary ones, getting the
        # 66,000 of SmolLM2's weights takes three times as long as copying into them.
        memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.memory = torch.from_numpy(memory[start : start + num_bytes])  # bytes
        self._end_of_taken = 0

    @classmethod
    def of(cls, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> Arena:
        """Room for one tensor of each."""
        sizes = (math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        return cls(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with anything in it."""
        start, num_bytes = self._end_of_taken, math.prod(shape) * dtype.itemsize
        self._end_of_taken += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self.memory[start : start + num_bytes].view(dtype).view(shape)
