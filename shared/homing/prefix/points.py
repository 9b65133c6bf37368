"""Routing points: the depths whose block hashes a client sends.

Every block to the 16th, then every 16th to the 512th, then every 64th, and always the prompt's
last full block. Apart from that last one the schedule does not depend on the prompt's length, so
that long and short prompts meet at the same depths; a prompt of 131,072 tokens costs the
coordinator about 170 look-ups instead of 8,192.
"""

from __future__ import annotations

from functools import lru_cache

from homing.prefix.hashing import block_hashes

DENSE_UNTIL, COARSE_STEP = 16, 16
COARSE_UNTIL, SPARSE_STEP = 512, 64


@lru_cache(maxsize=4096)
def routing_points(num_blocks: int) -> tuple[int, ...]:
    """Depths in `[1, num_blocks]`, ascending: depth d stands for the hash of block d-1."""
    points = [
        *range(1, min(num_blocks, DENSE_UNTIL) + 1),
        *range(DENSE_UNTIL + COARSE_STEP, min(num_blocks, COARSE_UNTIL) + 1, COARSE_STEP),
        *range(COARSE_UNTIL + SPARSE_STEP, num_blocks + 1, SPARSE_STEP),
    ]
    if num_blocks and points[-1] != num_blocks:
        points.append(num_blocks)
    return tuple(points)


def last_common_point(num_blocks: int) -> int:
    """The deepest depth up to `num_blocks` that is a routing point of every longer prompt, too."""
    if num_blocks <= DENSE_UNTIL:
        return num_blocks
    return num_blocks - num_blocks % (COARSE_STEP if num_blocks <= COARSE_UNTIL else SPARSE_STEP)


@lru_cache(maxsize=4096)
def num_routing_points(num_blocks: int) -> int:
    return len(routing_points(num_blocks))


def routing_hashes(tokens: bytes, block_size: int, salt: bytes = b"") -> bytes:
    """The hashes of a prompt's blocks at its routing points, joined, as a Submit carries them."""
    hashes = block_hashes(tokens, block_size, salt)
    return b"".join(hashes[depth - 1] for depth in routing_points(len(hashes)))
