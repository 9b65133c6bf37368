"""What a suspended engine has given back, and how it gets it again.

Weights and KV cache keep their addresses: their contents go to a file, or nowhere, and their pages
to the system.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from homing.engine.kv_cache import KVCache
from homing.engine.memory import Spill, release
from homing.engine.models import Model


class Suspension:
    """Nothing is given back at first."""

    def __init__(self) -> None:
        self.is_active = False
        self._weights: Spill | None = None
        self._weight_memory: Sequence[Tensor] = ()
        self._kv: Spill | None = None
        self._kv_blocks = torch.empty(0, dtype=torch.int64)

    @property
    def has_weights(self) -> bool:
        """The model's weights are given back."""
        return self._weights is not None

    def offload_weights(self, model: Model) -> int:
        """Returns the bytes given back. Raises OSError, and gives nothing back, when there is no
        room for the file."""
        if self._weights is not None:
            return 0
        self._weight_memory = model.memory
        self._weights = _written(self._weight_memory)
        return release(self._weight_memory)

    def offload_kv(self, cache: KVCache, blocks: Sequence[int]) -> int:
        """Keep the contents of these blocks. Otherwise like `offload_weights`."""
        if self._kv is not None:
            return 0
        self._kv_blocks = torch.tensor(blocks, dtype=torch.int64)
        self._kv = _written([layer[self._kv_blocks] for layer in _layers(cache)])
        return release(_layers(cache))

    def discard_kv(self, cache: KVCache) -> int:
        """Keep nothing. Returns the bytes given back."""
        if self._kv is not None:
            self._kv.close()
            self._kv = None
        return release(_layers(cache))

    def forget_weights(self) -> None:
        """The model has others now, and never needs those again."""
        if self._weights is not None:
            self._weights.close()
        self._weights, self._weight_memory = None, ()

    def end(self, cache: KVCache) -> None:
        """Get everything back."""
        if self._weights is not None:
            for tensor in self._weight_memory:
                self._weights.read_into(tensor)
            self.forget_weights()
        if self._kv is not None:
            for layer in _layers(cache):
                layer[self._kv_blocks] = self._kv.read(layer[self._kv_blocks])
            self._kv.close()
            self._kv = None
        self.is_active = False


def _layers(cache: KVCache) -> list[Tensor]:
    return [*cache.keys, *cache.values]


def _written(tensors: Sequence[Tensor]) -> Spill:
    spill = Spill()
    try:
        for tensor in tensors:
            spill.write(tensor)
        spill.rewind()
    except OSError:
        spill.close()
        raise
    return spill
