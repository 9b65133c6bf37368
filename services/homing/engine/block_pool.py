"""The KV blocks of a replica: who holds which, which are kept for their prefix, and which go next.

A block is in one of three places:

    free      holds nothing of use
    held      by one or more requests, which count as references
    cached    held by nobody, but in the prefix index: a later request may find it there

A full block whose tokens are computed is entered into the prefix index under its chained hash, so
equal hashes mean equal tokens from position 0. Two requests may have computed the same block side
by side; the second to register gets the first one's block in exchange for its own (their contents
have the same bits). Therefore whoever holds an indexed block holds all of its indexed ancestors,
too.

Eviction takes the block that was released longest ago. A request releases its blocks last one
first, so with the rule above a cached block always stands before its parent: the head of the queue
is a leaf, and no block is ever left in the index without its prefix. That makes eviction O(1).

Block 0 is scratch and belongs to nobody: padded tables point to it, and it takes the writes for
positions that lie in shared blocks. A prompt that is cached to its last token still needs that
token's logits: the row is computed again, reads the shared block, and writes to scratch. So a
shared block is never written, and copy-on-write is not needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

from homing.prefix import BlockHash

if TYPE_CHECKING:
    from homing.engine.kv_journal import KvJournal

EvictionPolicy = Literal["lru", "ref_zero"]
"""When a block that is in the prefix index goes: when its memory is needed, or when nobody holds it
any more."""

SCRATCH_BLOCK = 0

RUN_BLOCKS = 8
"""Neighbouring blocks are read faster from memory (5 to 15 % of a decode step): a growing request
has this many to itself while there is room."""

EVICTION_SHARE = 64
"""Evicting up to 1/64 of the pool at once, instead of one block, lets evicted neighbours be handed
out as a run."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` includes the scratch block."""
        self.num_blocks = num_blocks
        self.journal: KvJournal | None = None
        """Told of what leaves the prefix index, where somebody wants to know."""
        self.eviction: EvictionPolicy = "lru"
        self._free = _FreeBlocks(num_blocks)
        self._num_references = [0] * num_blocks
        self._hash_of_block: list[BlockHash | None] = [None] * num_blocks
        self._block_of_hash: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # released longest ago first

    # What there is

    @property
    def capacity(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give, by eviction if need be."""
        return self._free.count + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.capacity - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def blocks_in_use(self) -> list[int]:
        """Held or cached: those whose contents matter."""
        return [block for block in range(1, self.num_blocks) if block not in self._free]

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of_hash

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix that is in the index. They are not held yet."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached_among(self, blocks: Iterable[int]) -> int:
        """How many of these count as available now, and would not once they are held."""
        return sum(block in self._cached for block in blocks)

    # What requests do

    def hold(self, blocks: Iterable[int]) -> None:
        """Take a reference to blocks that `match` found."""
        for block in blocks:
            self._num_references[block] += 1
            self._cached.pop(block, None)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` blocks with one reference each, the neighbours of block `after` if they are free.

        The caller has seen to it that so many are available.
        """
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} there"
        if count > self._free.count:
            self._evict(max(count - self._free.count, self.num_blocks // EVICTION_SHARE))
        blocks: list[int] = []
        for _ in range(count):
            after = self._free.take(after)
            self._num_references[after] = 1
            blocks.append(after)
        return blocks

    def peek(self, afters: Sequence[int]) -> list[int] | None:
        """The blocks that `allocate(1, after=block)` would give for each of these in turn, as long
        as nothing else happens; None if something had to be evicted for them. Takes none."""
        return self._free.peek(afters) if len(afters) <= self._free.count else None

    def register(self, block: int, block_hash: BlockHash) -> int:
        """Enter a held, computed block into the index. All blocks before it are there already.

        Returns the block to use from now on: this one, or an earlier one of the same content.
        """
        twin = self._block_of_hash.setdefault(block_hash, block)
        if twin != block:
            self.hold([twin])
            self.release([block])
        else:
            self._hash_of_block[block] = block_hash
        return twin

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of a request's blocks, given in order of position."""
        for block in reversed(blocks):
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} was released too often"
            if self._num_references[block] == 0:
                if self._hash_of_block[block] is None:
                    self._free.put(block)
                elif self.eviction == "ref_zero":
                    self._forget(block)
                else:
                    self._cached[block] = None

    def clear_index(self) -> int:
        """Forget every prefix. Held blocks stay held. Returns how many were indexed."""
        num_indexed = len(self._block_of_hash)
        self._hash_of_block = [None] * self.num_blocks
        self._block_of_hash.clear()
        for block in self._cached:
            self._free.put(block)
        self._cached.clear()
        if self.journal:
            self.journal.cleared()
        return num_indexed

    def _evict(self, count: int) -> None:
        for _ in range(min(count, len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of_block[block]
        assert block_hash is not None
        del self._block_of_hash[block_hash]
        self._hash_of_block[block] = None
        self._free.put(block)
        if self.journal:
            self.journal.evicted(block_hash)

    # What tests and an idle engine check

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with each other and with the holders."""
        counted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        assert counted == self._num_references, "references disagree with the holders"
        assert counted[SCRATCH_BLOCK] == 0, "somebody holds the scratch block"
        indexed = {h: b for b, h in enumerate(self._hash_of_block) if h is not None}
        assert indexed == self._block_of_hash, "the index is not one to one"
        self._free.check()
        for block in range(1, self.num_blocks):
            places = [
                block in self._free,
                self._num_references[block] > 0,
                block in self._cached,
            ]
            assert sum(places) == 1, f"block {block} is in {sum(places)} places"
            is_indexed = self._hash_of_block[block] is not None
            assert not is_indexed or not places[0], f"free block {block} is in the index"
            assert is_indexed or not places[2], f"cached block {block} is not in the index"


class _FreeBlocks:
    """Free block ids, handed out in runs of neighbours; every operation takes constant time.

    Blocks are grouped in runs of RUN_BLOCKS. Who does not continue a run begins a wholly free one;
    only when there is none left are the holes in begun ones filled.
    """

    def __init__(self, num_blocks: int) -> None:
        self._is_free = bytearray(num_blocks)
        self._num_free_of_run = [0] * (-(-num_blocks // RUN_BLOCKS))
        self._num_blocks_of_run = [
            min(RUN_BLOCKS, num_blocks - run * RUN_BLOCKS)
            for run in range(len(self._num_free_of_run))
        ]
        self._num_blocks_of_run[0] -= 1  # the scratch block
        self._whole: OrderedDict[int, None] = OrderedDict()  # runs of which every block is free
        self._begun: OrderedDict[int, None] = OrderedDict()  # runs of which some blocks are
        self.count = 0
        for block in range(num_blocks - 1, SCRATCH_BLOCK, -1):
            self.put(block)

    def __contains__(self, block: int) -> bool:
        return bool(self._is_free[block])

    def put(self, block: int) -> None:
        assert not self._is_free[block], f"block {block} is freed twice"
        self._is_free[block] = True
        self.count += 1
        self._recount(block // RUN_BLOCKS, +1)

    def take(self, after: int | None) -> int:
        """The block behind `after` if it is free, else the first of a wholly free run, else any."""
        block = None if after is None else after + 1
        if block is None or block == len(self._is_free) or not self._is_free[block]:
            run = next(reversed(self._whole or self._begun))
            block = self._is_free.index(True, run * RUN_BLOCKS)
        self._is_free[block] = False
        self.count -= 1
        self._recount(block // RUN_BLOCKS, -1)
        return block

    def peek(self, afters: Sequence[int]) -> list[int]:
        """What `take` would give for each of these in turn. So many are free."""
        given: list[int] = []
        left: dict[int, int] = {}  # run -> how many of its blocks are free then
        for after in afters:
            block = after + 1
            if block == len(self._is_free) or not self._is_free[block] or block in given:
                first = self._next_run(left) * RUN_BLOCKS
                ids = range(first, first + RUN_BLOCKS)
                block = next(b for b in ids if self._is_free[b] and b not in given)
            given.append(block)
            run = block // RUN_BLOCKS
            left[run] = left.get(run, self._num_free_of_run[run]) - 1
        return given

    def _next_run(self, left: Mapping[int, int]) -> int:
        """Where `take` would look, with so many blocks left of the runs that it took from."""
        whole = next((run for run in reversed(self._whole) if run not in left), None)
        if whole is not None:
            return whole
        begun_here = [run for run in left if run in self._whole]
        begun = chain(reversed(begun_here), reversed(self._begun))
        return next(run for run in begun if left.get(run, 1))

    def _recount(self, run: int, change: int) -> None:
        num_free = self._num_free_of_run[run] = self._num_free_of_run[run] + change
        self._whole.pop(run, None)
        if num_free == self._num_blocks_of_run[run]:
            self._begun.pop(run, None)
            self._whole[run] = None
        elif num_free:
            self._begun[run] = None
        else:
            self._begun.pop(run, None)

    def check(self) -> None:
        assert self.count == sum(self._is_free)
        for run, num_free in enumerate(self._num_free_of_run):
            start = run * RUN_BLOCKS
            assert num_free == sum(self._is_free[start : start + RUN_BLOCKS])
            whole = num_free == self._num_blocks_of_run[run] and num_free > 0
            assert (run in self._whole) == whole
            assert (run in self._begun) == (num_free > 0 and not whole)
