"""BlockCache: which KV blocks a simulated rank has, and which go when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """KV blocks that may be found again: held by requests, or kept until their room is needed.

    Requests let go of their last block first, so the block that was let go longest ago is a leaf:
    no block stays without its prefix.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._block_tokens = block_tokens
        self._holders: dict[int, int] = {}  # block id -> how many requests hold it
        self._kept: OrderedDict[int, None] = OrderedDict()  # let go longest ago first
        self._private_tokens = 0

    @property
    def num_held_tokens(self) -> int:
        return len(self._holders) * self._block_tokens + self._private_tokens

    @property
    def is_idle(self) -> bool:
        return not self._holders and not self._private_tokens

    def match(self, block_ids: Sequence[int]) -> int:
        """How many of the first blocks are here."""
        holders, kept = self._holders, self._kept
        for i, block in enumerate(block_ids):
            if block not in holders and block not in kept:
                return i
        return len(block_ids)

    def reserve(self, cached: Sequence[int], private_tokens: int) -> bool:
        """Hold these blocks and so many tokens besides, or, where they do not fit, nothing."""
        newly_held = sum(block in self._kept for block in cached)
        needed = self.num_held_tokens + newly_held * self._block_tokens + private_tokens
        if needed > self._capacity:
            return False
        for block in cached:
            self._hold(block)
        self._private_tokens += private_tokens
        self._evict()
        return True

    def publish(self, block_ids: Sequence[int]) -> None:
        """Blocks that a request held as private tokens have been computed: others may use them."""
        for block in block_ids:
            self._hold(block)
        self._private_tokens -= len(block_ids) * self._block_tokens

    def release(self, block_ids: Sequence[int], private_tokens: int) -> None:
        holders, kept = self._holders, self._kept
        for block in reversed(block_ids):
            if holders[block] == 1:
                del holders[block]
                kept[block] = None
            else:
                holders[block] -= 1
        self._private_tokens -= private_tokens

    def _hold(self, block: int) -> None:
        self._kept.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def _evict(self) -> None:
        room = (self._capacity - self.num_held_tokens) // self._block_tokens
        while len(self._kept) > room:
            self._kept.popitem(last=False)
