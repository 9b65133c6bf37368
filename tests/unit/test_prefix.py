"""Block hashes and routing points."""

from __future__ import annotations

import array
from hashlib import blake2b

import pytest

from homing.prefix import (
    block_hashes,
    extend_hashes,
    last_common_point,
    num_routing_points,
    prefix_salt,
    routing_points,
)


def tokens(*ids: int) -> bytes:
    return array.array("I", ids).tobytes()


def test_a_block_hash_chains_the_one_before_it():
    data = tokens(*range(8))
    first = blake2b(data[:16], digest_size=16).digest()
    second = blake2b(first + data[16:], digest_size=16).digest()
    assert block_hashes(data, 4) == [first, second]


def test_the_hashes_of_a_known_prompt_are_pinned():
    assert [h.hex() for h in block_hashes(tokens(*range(8)), 4)] == [
        "35ce1b7dc4da8ce51a7591561b3595db",
        "29d97b3f27d3692fd728ae911c6112e0",
    ]


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_a_hash(count, expected):
    assert len(block_hashes(tokens(*range(count)), 4)) == expected


def test_equal_prefixes_have_equal_hashes_and_a_changed_token_changes_all_that_follow():
    a = block_hashes(tokens(*range(16)), 4)
    b = block_hashes(tokens(*range(7), 99, *range(8, 16)), 4)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])


def test_hashes_can_be_extended_as_tokens_come():
    data = tokens(*range(16))
    known = block_hashes(data[:32], 4)
    assert known + extend_hashes(known, data, 4) == block_hashes(data, 4)


def test_the_plain_salt_is_empty_so_plain_hashes_are_unsalted():
    assert prefix_salt() == b""
    assert block_hashes(tokens(*range(4)), 4, prefix_salt()) == block_hashes(tokens(*range(4)), 4)


def test_salts_of_different_parts_differ():
    salts = [
        prefix_salt(epoch=1),
        prefix_salt(epoch=11),
        prefix_salt(cache_salt="1"),
        prefix_salt(epoch=1, cache_salt="1"),
        prefix_salt(epoch=11, cache_salt=""),
        prefix_salt(epoch=1, cache_salt="11"),
    ]
    assert len(set(salts)) == 5


def test_routing_points_are_dense_then_coarse_then_sparse():
    assert routing_points(0) == ()
    assert routing_points(3) == (1, 2, 3)
    assert routing_points(17) == (*range(1, 17), 17)
    assert routing_points(40) == (*range(1, 17), 32, 40)
    assert routing_points(512)[-2:] == (496, 512)
    assert routing_points(600)[-3:] == (512, 576, 600)


def test_long_and_short_prompts_meet_at_the_same_depths():
    long = set(routing_points(8192))
    for blocks in (1, 16, 100, 512, 513, 2000, 8191):
        assert set(routing_points(blocks)[:-1]) <= long


def test_the_last_common_point_is_one_of_every_longer_prompt():
    for num_blocks in range(1300):
        common = last_common_point(num_blocks)
        longer = {*routing_points(num_blocks + 1)}
        assert common == max(({*routing_points(num_blocks)} & longer), default=0)


def test_a_prompt_of_131072_tokens_has_about_170_points():
    assert num_routing_points(131072 // 16) == 16 + 31 + 120
