"""RankLoads: how much each rank has in flight, kept so that choosing needs no scan.

Load is counted in requests or in tokens, as whoever charges it likes: whole numbers, so that what
was charged can be given back exactly.

A live rank occupies a *slot*, a small number; a set of slots is an int used as a bit mask. For each
load there is the mask of the slots that have it, so the least loaded slot of a set is the first
bucket, in ascending order, that meets the set: 256 ranks cost a few ANDs, not 256 comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, count
from typing import NewType, cast

Slot = NewType("Slot", int)


_DIGIT_VALUES = bytes.maketrans(b"01", b"\0\1")


@lru_cache(maxsize=1024)
def slots_of(mask: int) -> tuple[Slot, ...]:
    """The slots in a set, ascending. In C from end to end: a policy may do this 256 ranks wide."""
    if mask & (mask - 1) == 0:
        return (Slot(mask.bit_length() - 1),) if mask else ()
    digits = f"{mask:b}"[::-1].encode().translate(_DIGIT_VALUES)
    return tuple(cast("Iterator[Slot]", compress(count(), digits)))


@dataclass(slots=True)
class _Books:
    """Of one open slot."""

    limit: int
    """Requests that it may have."""
    load: int = 0
    requests: int = 0
    tokens: int = 0
    """Of the prompts of its requests."""
    turn: int = 0
    """When it was last chosen, counted in choices; 0 is never."""


class RankLoads:
    """Loads of the open slots. A load rises at dispatch and falls at finish, abort or loss."""

    def __init__(self, *, max_load: int, max_tokens: int | None = None, floor: int = 1) -> None:
        """max_load: requests that a slot may have, unless `limit` says otherwise; max_tokens:
        tokens of prompts with which it takes no more."""
        self._max_requests = max_load
        self._max_tokens = max_tokens
        self.floor = floor
        """What one request of a usual size loads: a lower mean load says nothing of imbalance."""
        self.available = 0
        """The open slots that may be given another request."""
        self.total = 0
        self._books: dict[Slot, _Books] = {}
        self._slots_with_load: dict[int, int] = {}  # load -> mask of the slots that have it
        self._loads: list[int] = []  # the keys above, ascending
        self._by_turn: OrderedDict[Slot, None] = OrderedDict()  # least recently chosen first
        self._turn = 0

    @property
    def num_open(self) -> int:
        return len(self._books)

    @property
    def num_places(self) -> int:
        """Requests that the open slots may have together."""
        return sum(books.limit for books in self._books.values())

    @property
    def mean(self) -> float:
        return self.total / len(self._books) if self._books else 0.0

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._books

    def load(self, slot: Slot) -> int:
        return self._books[slot].load

    def turn(self, slot: Slot) -> int:
        """When the slot was last chosen, counted in choices; 0 is never."""
        return self._books[slot].turn

    def open(self, slot: Slot) -> None:
        """Let a slot be chosen, starting with no load."""
        assert slot not in self._books
        self._books[slot] = _Books(limit=self._max_requests)
        self.available |= 1 << slot
        self._by_turn[slot] = None
        self._by_turn.move_to_end(slot, last=False)
        self._put(slot, 0)

    def close(self, slot: Slot) -> None:
        """Forget a slot. Its load must have been given back."""
        load = self._books.pop(slot).load
        assert load == 0, f"slot {slot} closes with a load of {load}"
        del self._by_turn[slot]
        self._take(slot, 0)
        self.available &= ~(1 << slot)

    def limit(self, slot: Slot, max_requests: int) -> None:
        """Let a slot have so many requests from now on; those that it has beyond that stay."""
        self._books[slot].limit = max_requests
        self._change(slot, 0, 0, 0)

    def charge(self, slot: Slot, amount: int = 1, tokens: int = 0) -> None:
        """Count a request that was sent to this slot, with a prompt of so many tokens."""
        books = self._change(slot, amount, 1, tokens)
        self._turn = books.turn = self._turn + 1
        self._by_turn.move_to_end(slot)

    def give_back(self, slot: Slot, amount: int = 1, tokens: int = 0) -> None:
        """Count a request of this slot that ended, for which so much was charged."""
        self._change(slot, -amount, -1, -tokens)

    def least_loaded(self, slots: int) -> Slot:
        """Of a non-empty set of open slots: the least loaded; of those, the least recently
        chosen."""
        if slots & (slots - 1) == 0:
            return Slot(slots.bit_length() - 1)
        for load in self._loads:
            if tied := self._slots_with_load[load] & slots:
                return self.least_recent(tied)
        raise AssertionError("none of the slots is open")

    def least_recent(self, slots: int) -> Slot:
        """Of a non-empty set of open slots: the one chosen longest ago."""
        if slots & (slots - 1) == 0:
            return Slot(slots.bit_length() - 1)
        if slots.bit_count() <= 8:
            return min(slots_of(slots), key=self.turn)
        # Among many, one of them is soon met in the order of turns.
        return next(slot for slot in self._by_turn if slots >> slot & 1)

    def _change(self, slot: Slot, amount: int, requests: int, tokens: int) -> _Books:
        books = self._books[slot]
        load = books.load + amount
        assert load >= 0, f"slot {slot} has a load of {books.load}, not {-amount} to give back"
        if amount:
            self._take(slot, books.load)
            self._put(slot, load)
            books.load = load
            self.total += amount
        books.requests += requests
        books.tokens += tokens
        if self._has_place(books):
            self.available |= 1 << slot
        else:
            self.available &= ~(1 << slot)
        return books

    def _has_place(self, books: _Books) -> bool:
        if books.requests >= books.limit:
            return False
        return self._max_tokens is None or books.tokens < self._max_tokens

    def _put(self, slot: Slot, load: int) -> None:
        if load in self._slots_with_load:
            self._slots_with_load[load] |= 1 << slot
        else:
            self._slots_with_load[load] = 1 << slot
            insort(self._loads, load)

    def _take(self, slot: Slot, load: int) -> None:
        left = self._slots_with_load[load] & ~(1 << slot)
        if left:
            self._slots_with_load[load] = left
        else:
            del self._slots_with_load[load]
            del self._loads[bisect_left(self._loads, load)]

    def check(self) -> None:
        """Assert that the containers agree."""
        assert self.total == sum(books.load for books in self._books.values())
        assert self._loads == sorted(self._slots_with_load)
        assert self._by_turn.keys() == self._books.keys()
        for load, mask in self._slots_with_load.items():
            assert mask
            assert all(self._books[slot].load == load for slot in slots_of(mask))
        assert sum(m.bit_count() for m in self._slots_with_load.values()) == self.num_open
        places = (1 << slot for slot, books in self._books.items() if self._has_place(books))
        assert self.available == sum(places)
