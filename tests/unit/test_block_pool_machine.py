"""Random operations on a small pool, with every invariant checked after each."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from homing.engine.block_pool import BlockPool, EvictionPolicy
from homing.prefix import BlockHash, block_hashes

NUM_BLOCKS = 14
TOKENS = st.lists(st.sampled_from(b"ab"), max_size=6).map(bytes)


def hashes_of(tokens: bytes) -> list[BlockHash]:
    """One token a block, so that prefixes meet and part often."""
    return block_hashes(b"".join(bytes([token, 0, 0, 0]) for token in tokens), 1)


class Holder:
    """A request: the blocks that it holds for its tokens, the first of which are computed."""

    def __init__(self, tokens: bytes, blocks: list[int], num_registered: int) -> None:
        self.hashes = hashes_of(tokens)
        self.blocks = blocks
        self.num_registered = num_registered
        self.registers = True


class PoolMachine(RuleBasedStateMachine):
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.live: list[Holder] = []
        self.seen: set[bytes] = set()  # all token sequences that were ever registered

    @initialize(eviction=st.sampled_from(["lru", "ref_zero"]))
    def choose(self, eviction: EvictionPolicy) -> None:
        self.pool.eviction = eviction

    @rule(target=holders, tokens=TOKENS)
    def admit(self, tokens: bytes) -> Holder:
        cached = self.pool.match(hashes_of(tokens))
        num_new = len(tokens) - len(cached)
        holder = Holder(tokens, [], 0)
        if num_new + self.pool.num_cached_among(cached) <= self.pool.num_available:
            available = self.pool.num_available
            num_pinned = self.pool.num_cached_among(cached)
            self.pool.hold(cached)
            new = self.pool.allocate(num_new, after=cached[-1] if cached else None)
            assert self.pool.num_available == available - num_pinned - num_new
            holder = Holder(tokens, cached + new, len(cached))
            self.live.append(holder)
            self.seen |= {tokens[:end] for end in range(1, len(tokens) + 1)}
        return holder

    @rule(holder=holders, count=st.integers(1, 3))
    def compute(self, holder: Holder, count: int) -> None:
        if holder not in self.live or not holder.registers:
            return
        end = min(holder.num_registered + count, len(holder.blocks))
        for index in range(holder.num_registered, end):
            holder.blocks[index] = self.pool.register(holder.blocks[index], holder.hashes[index])
        holder.num_registered = end

    @rule(holder=consumes(holders))
    def leave(self, holder: Holder) -> None:
        if holder in self.live:
            self.live.remove(holder)
            self.pool.release(holder.blocks)

    @rule(afters=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=4))
    def foresee(self, afters: list[int]) -> None:
        num_free = self.pool.num_available - self.pool.num_cached
        blocks = self.pool.peek(afters)
        assert (blocks is None) == (len(afters) > num_free)
        if blocks is not None:
            assert [self.pool.allocate(1, after=after)[0] for after in afters] == blocks
            self.pool.release(blocks)

    @rule()
    def clear_index(self) -> None:
        self.pool.clear_index()
        for holder in self.live:
            holder.registers = False

    @invariant()
    def books_agree(self) -> None:
        self.pool.check([holder.blocks for holder in self.live])

    @invariant()
    def what_nobody_holds_is_kept_by_lru_alone(self) -> None:
        assert self.pool.eviction == "lru" or self.pool.num_cached == 0

    @invariant()
    def no_block_is_in_the_index_without_its_prefix(self) -> None:
        for tokens in self.seen:
            hashes = hashes_of(tokens)
            if hashes[-1] in self.pool:
                assert len(self.pool.match(hashes)) == len(hashes)

    @invariant()
    def what_is_computed_and_held_is_found(self) -> None:
        for holder in self.live:
            if holder.registers:
                known = holder.hashes[: holder.num_registered]
                assert self.pool.match(known) == holder.blocks[: holder.num_registered]

    def teardown(self) -> None:
        for holder in self.live:
            self.pool.release(holder.blocks)
        self.pool.check([])
        assert self.pool.num_available == NUM_BLOCKS - 1


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
test_random_operations_keep_every_invariant = PoolMachine.TestCase
