"""Keys and values of preempted requests, kept outside of the cache and copied back when they go on.

What comes back are the very bits that were computed, so nothing depends on whether a request was
offloaded. Knows nothing of requests; the other place is the machine's memory, on a CPU too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from homing.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class SavedKV:
    """The first blocks of a request."""

    num_tokens: int
    """How many of their tokens were computed."""
    shareable: bool
    """Others may have them: all were computed with the weights of now."""
    layers: tuple[Tensor, ...]
    """A tensor [blocks, ...] for each of the cache's."""

    @property
    def num_blocks(self) -> int:
        return len(self.layers[0])


class KVOffload:
    def __init__(self, cache: KVCache, max_blocks: int) -> None:
        """Holds up to `max_blocks` blocks at a time."""
        self.num_blocks = 0
        self._max_blocks = max_blocks
        self._layers = (*cache.keys, *cache.values)

    def save(self, block_ids: Sequence[int], num_tokens: int, *, shareable: bool) -> SavedKV | None:
        """A copy of these blocks; None if there is no room. To be given back by `drop`."""
        if not block_ids or self.num_blocks + len(block_ids) > self._max_blocks:
            return None
        self.num_blocks += len(block_ids)
        index = torch.tensor(block_ids)
        copies = tuple(_bytes(layer)[index].cpu() for layer in self._layers)
        return SavedKV(num_tokens, shareable, copies)

    def load(self, saved: SavedKV, first: int, block_ids: Sequence[int]) -> None:
        """Copy saved blocks, from number `first` on, into these."""
        index = torch.tensor(block_ids)
        for layer, copy in zip(self._layers, saved.layers, strict=True):
            _bytes(layer)[index] = copy[first : first + len(block_ids)].to(layer.device)

    def drop(self, saved: SavedKV) -> None:
        self.num_blocks -= saved.num_blocks


def _bytes(layer: Tensor) -> Tensor:
    """The same memory as whole bytes: torch does not index every dtype."""
    return layer.view(torch.uint8)
