"""h[i] = BLAKE2b-128(key = salt, h[i-1] || tokens of block i as little-endian uint32).

Only full blocks have a hash. Chaining makes a hash name the whole prefix up to its block: equal
hashes mean equal tokens from position 0, under the same salt.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

DIGEST_BYTES = 16
TOKEN_BYTES = 4


def prefix_salt(*, epoch: int = 0, cache_salt: str = "") -> bytes:
    """The key that keeps prefixes of different weights or tenants apart; empty for the plain case.

    Each part is length-prefixed before hashing, so no two different pairs give the same salt.
    """
    if epoch == 0 and not cache_salt:
        return b""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in (str(epoch).encode(), cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hashes(tokens: bytes, block_size: int, salt: bytes = b"") -> list[BlockHash]:
    """Hash of each full block of `tokens` (little-endian uint32), in order."""
    return extend_hashes([], tokens, block_size, salt)


def extend_hashes(
    known: list[BlockHash],
    tokens: bytes | memoryview,
    block_size: int,
    salt: bytes = b"",
) -> list[BlockHash]:
    """The hashes of blocks `[len(known), full blocks of tokens)`, continuing the chain of `known`.

    `tokens` is the whole sequence from position 0, `known` the hashes of its first blocks.
    """
    view = memoryview(tokens)
    step = block_size * TOKEN_BYTES
    parent: bytes = known[-1] if known else b""
    hashes: list[BlockHash] = []
    for start in range(len(known) * step, len(view) - step + 1, step):
        block = parent + view[start : start + step]
        parent = blake2b(block, digest_size=DIGEST_BYTES, key=salt).digest()
        hashes.append(BlockHash(parent))
    return hashes
