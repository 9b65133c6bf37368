"""Chained hashes of a prompt's blocks, and at which depths they are worth sending.

Pure functions, standard library only. Client, coordinator and engine all use these, so a block has
one name everywhere. Knows nothing of requests, ranks or tensors.
"""

from homing.prefix.hashing import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    BlockHash,
    block_hashes,
    extend_hashes,
    prefix_salt,
)
from homing.prefix.points import (
    last_common_point,
    num_routing_points,
    routing_hashes,
    routing_points,
)

__all__ = [
    "DIGEST_BYTES",
    "TOKEN_BYTES",
    "BlockHash",
    "block_hashes",
    "extend_hashes",
    "last_common_point",
    "num_routing_points",
    "prefix_salt",
    "routing_hashes",
    "routing_points",
]
