"""The block pool: references, the prefix index, eviction, and runs of neighbours."""

from __future__ import annotations

import random

import pytest

from homing.engine.block_pool import RUN_BLOCKS, SCRATCH_BLOCK, BlockPool
from homing.prefix import BlockHash


def chain(name: str, length: int) -> list[BlockHash]:
    """Hashes of one sequence's blocks; sequences of different names share none."""
    return [BlockHash(f"{name}{depth}".encode()) for depth in range(length)]


def compute(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Allocate and register a block for each hash, as a request does that finds nothing cached."""
    blocks = pool.allocate(len(hashes))
    return [pool.register(b, h) for b, h in zip(blocks, hashes, strict=True)]


def test_all_blocks_but_the_scratch_block_can_be_held():
    pool = BlockPool(9)
    blocks = pool.allocate(8)
    assert sorted(blocks) == list(range(1, 9))
    assert SCRATCH_BLOCK not in blocks
    assert pool.num_available == 0
    pool.check([blocks])


def test_more_blocks_than_there_are_cannot_be_allocated():
    with pytest.raises(AssertionError, match="9 blocks asked, 8 there"):
        BlockPool(9).allocate(9)


def test_a_block_that_holds_no_full_prefix_is_free_once_released():
    pool = BlockPool(9)
    pool.release(pool.allocate(3))
    assert (pool.num_available, pool.num_cached) == (8, 0)
    pool.check([])


def test_a_registered_block_is_found_after_its_request_has_left():
    pool = BlockPool(9)
    hashes = chain("a", 3)
    blocks = compute(pool, hashes)
    pool.release(blocks)
    assert pool.match([*hashes, *chain("b", 1)]) == blocks
    assert pool.num_available == 8


def test_a_match_ends_at_the_first_block_that_is_missing():
    pool = BlockPool(9)
    hashes = chain("a", 3)
    compute(pool, [hashes[0]])
    compute(pool, [hashes[2]])
    assert len(pool.match(hashes)) == 1


def test_a_shared_block_is_held_until_its_last_holder_releases_it():
    pool = BlockPool(9)
    hashes = chain("a", 2)
    first = compute(pool, hashes)
    second = pool.match(hashes)
    pool.hold(second)
    pool.release(first)
    assert pool.num_held == 2
    pool.check([second])
    pool.release(second)
    assert pool.num_held == 0
    pool.check([])


def test_releasing_a_block_twice_is_an_error():
    pool = BlockPool(9)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(blocks)


def test_two_requests_that_computed_the_same_block_end_up_sharing_one():
    pool = BlockPool(9)
    hashes = chain("a", 2)
    first = compute(pool, hashes)
    second = compute(pool, hashes)
    assert second == first
    assert pool.num_held == 2
    pool.check([first, second])


def test_the_block_released_longest_ago_is_evicted_first():
    pool = BlockPool(5)
    old, new = chain("old", 2), chain("new", 2)
    old_blocks, new_blocks = compute(pool, old), compute(pool, new)
    pool.release(old_blocks)
    pool.release(new_blocks)
    pool.allocate(1)
    assert (len(pool.match(old)), len(pool.match(new))) == (1, 2)
    pool.allocate(1)
    assert (len(pool.match(old)), len(pool.match(new))) == (0, 2)


def test_a_block_that_was_used_again_outlives_those_that_were_not():
    pool = BlockPool(5)
    old, new = chain("old", 2), chain("new", 2)
    old_blocks, new_blocks = compute(pool, old), compute(pool, new)
    pool.release(old_blocks)
    pool.release(new_blocks)
    pool.hold(pool.match(old))
    pool.release(old_blocks)
    pool.allocate(2)
    assert (len(pool.match(old)), len(pool.match(new))) == (2, 0)


def test_a_parent_outlives_each_of_its_children():
    """The parent is released with the first child, long before the second one."""
    pool = BlockPool(5)
    parent, left, right = chain("parent", 1), chain("left", 1), chain("right", 1)
    first = compute(pool, parent + left)
    pool.hold(pool.match(parent))
    second = [first[0], *compute(pool, right)]
    pool.release(first)
    pool.release(second)
    pool.allocate(2)  # one was free
    assert (left[0] in pool, right[0] in pool, parent[0] in pool) == (False, True, True)
    pool.allocate(1)
    assert (right[0] in pool, parent[0] in pool) == (False, True)


def test_held_blocks_are_never_evicted():
    pool = BlockPool(5)
    held = compute(pool, chain("a", 2))
    pool.release(compute(pool, chain("b", 2)))
    assert not set(pool.allocate(2)) & set(held)
    assert pool.match(chain("a", 2)) == held


def test_matched_blocks_that_are_cached_count_as_available_until_they_are_held():
    pool = BlockPool(9)
    hashes = chain("a", 3)
    pool.release(compute(pool, hashes))
    matched = pool.match(hashes)
    assert pool.num_cached_among(matched) == 3
    pool.hold(matched)
    assert pool.num_cached_among(matched) == 0
    assert pool.num_available == 5


def test_clearing_the_index_frees_what_is_cached_and_leaves_what_is_held():
    pool = BlockPool(9)
    pool.release(compute(pool, chain("cached", 2)))
    held = compute(pool, chain("held", 2))
    assert pool.clear_index() == 4
    assert pool.match(chain("held", 2)) == []
    pool.check([held])
    pool.release(held)
    assert (pool.num_available, pool.num_cached) == (8, 0)


def test_a_growing_request_gets_neighbouring_blocks():
    pool = BlockPool(8 * RUN_BLOCKS)
    tables = [pool.allocate(1) for _ in range(4)]
    for _ in range(RUN_BLOCKS - 2):  # the first run is one block shorter: the scratch block's
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    for table in tables:
        assert table == list(range(table[0], table[0] + RUN_BLOCKS - 1))


def test_a_prompt_gets_neighbouring_blocks():
    assert BlockPool(64).allocate(40) == list(range(1, 41))


def test_holes_are_filled_when_no_whole_run_is_left():
    pool = BlockPool(3 * RUN_BLOCKS)
    everything = pool.allocate(pool.capacity)
    holes = everything[::3]
    pool.release(holes)
    assert sorted(pool.allocate(len(holes))) == sorted(holes)


def test_blocks_evicted_from_one_sequence_are_handed_out_as_a_run():
    pool = BlockPool(64 * RUN_BLOCKS)
    pool.release(compute(pool, chain("a", pool.capacity)))
    table = pool.allocate(1)
    for _ in range(RUN_BLOCKS - 1):
        table += pool.allocate(1, after=table[-1])
    assert table == list(range(table[0], table[0] + RUN_BLOCKS))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_peeked_at_is_what_is_given(seed: int):
    """In pools of many runs, some whole, some begun, for requests that grow side by side."""
    source = random.Random(seed)
    pool = BlockPool(20 * RUN_BLOCKS + 3)
    tables = [pool.allocate(1) for _ in range(12)]
    for _ in range(300):
        table = source.choice(tables)
        if source.random() < 0.1:
            pool.release(table)
            table[:] = pool.allocate(1)
        growing = source.sample(tables, source.randrange(1, 12))
        foreseen = pool.peek([table[-1] for table in growing])
        pool.check(tables)
        if foreseen is None:
            assert pool.num_available < len(growing)
            for table in source.sample(tables, 8):
                pool.release(table[1:])
                del table[1:]
            continue
        given = [pool.allocate(1, after=table[-1])[0] for table in growing]
        assert given == foreseen
        for table, block in zip(growing, given, strict=True):
            table.append(block)
