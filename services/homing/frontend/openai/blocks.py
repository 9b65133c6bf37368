"""Lists of an answer that may be as long as a prompt.

They are made and encoded a block at a time. So their objects are never there all at once, and the
event loop gets the GIL between two blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, cast

import msgspec

BLOCK = 256

T = TypeVar("T")


def blocks_of(items: Iterable[T]) -> Iterator[list[T]]:
    """All but the last have `BLOCK` items."""
    iterator = iter(items)
    while block := list(islice(iterator, BLOCK)):
        yield block


def json_list(items: Iterable[T]) -> list[T]:
    """The items as a list that can be encoded, and nothing else if it is long."""
    blocks = blocks_of(items)
    first = next(blocks, [])
    if len(first) < BLOCK:
        return first
    return joined([encoded(first), *map(encoded, blocks)])


def encoded(block: list[Any]) -> bytes:
    """A block's items, as `joined` takes them."""
    return msgspec.json.encode(block)[1:-1]


def joined(blocks: Iterable[bytes]) -> list[Any]:
    """What stands for the list where it is encoded."""
    return cast(list[Any], msgspec.Raw(b"[" + b",".join(blocks) + b"]"))
