"""RankLoads: how much each rank has in flight, and which of a set has the least.

Load is counted in requests or in tokens, as whoever charges it likes: whole numbers, so that what
was charged can be given back exactly.

A live rank occupies a *slot*, a small number; a set of slots is an int used as a bit mask. A slot's
load and turn are kept as one number, so that the least loaded of a set, ties to the least recently
chosen, is one `min` that runs in C: 256 ranks cost about ten microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, count
from typing import NewType, cast

Slot = NewType("Slot", int)

TURN_BITS = 48
"""Below a slot's load in its order: room for the choices of a century."""
_TURN = (1 << TURN_BITS) - 1
NO_LIMIT = 2**63

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
    requests: int = 0
    tokens: int = 0
    """Of the prompts of its requests."""


class RankLoads:
    """Loads of the open slots. A load rises at dispatch and falls at finish, abort or loss."""

    def __init__(self, *, max_load: int, max_tokens: int | None = None, floor: int = 1) -> None:
        """max_load: requests that a slot may have, unless `limit` says otherwise; max_tokens:
        tokens of prompts with which it takes no more."""
        self._max_requests = max_load
        self._max_tokens = NO_LIMIT if max_tokens is None else max_tokens
        self.floor = floor
        """What one request of a usual size loads: a lower mean load says nothing of imbalance."""
        self.available = 0
        """The open slots that may be given another request."""
        self.total = 0
        self.num_open = 0
        self._books: dict[Slot, _Books] = {}
        self._orders: dict[Slot, int] = {}  # slot -> its load, then its turn
        self._turn = 0
        self.order = self._orders.__getitem__
        """A slot's place among others: the less loaded before, then the less recently chosen."""

    @property
    def num_places(self) -> int:
        """Requests that the open slots may have together."""
        return sum(books.limit for books in self._books.values())

    @property
    def mean(self) -> float:
        return self.total / self.num_open if self.num_open else 0.0

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._books

    def load(self, slot: Slot) -> int:
        return self._orders[slot] >> TURN_BITS

    def turn(self, slot: Slot) -> int:
        """When a slot was last chosen, counted in choices; 0 is never."""
        return self._orders[slot] & _TURN

    def open(self, slot: Slot) -> None:
        """Let a slot be chosen, starting with no load."""
        assert slot not in self._books
        self._books[slot] = _Books(limit=self._max_requests)
        self.num_open += 1
        self._orders[slot] = 0
        self.available |= 1 << slot

    def close(self, slot: Slot) -> None:
        """Forget a slot. Its load must have been given back."""
        load = self.load(slot)
        assert load == 0, f"slot {slot} closes with a load of {load}"
        del self._books[slot], self._orders[slot]
        self.num_open -= 1
        self.available &= ~(1 << slot)

    def limit(self, slot: Slot, max_requests: int) -> None:
        """Let a slot have so many requests from now on; those that it has beyond that stay."""
        books = self._books[slot]
        books.limit = max_requests
        self._set_available(slot, books)

    def charge(self, slot: Slot, amount: int = 1, tokens: int = 0) -> None:
        """Count a request that was sent to this slot, with a prompt of so many tokens."""
        orders, books = self._orders, self._books[slot]
        self.total += amount
        self._turn = turn = self._turn + 1
        orders[slot] = (orders[slot] >> TURN_BITS) + amount << TURN_BITS | turn
        books.requests = requests = books.requests + 1
        books.tokens = tokens = books.tokens + tokens
        if requests >= books.limit or tokens >= self._max_tokens:  # it never becomes available here
            self.available &= ~(1 << slot)

    def give_back(self, slot: Slot, amount: int = 1, tokens: int = 0) -> None:
        """Count a request of this slot that ended, for which so much was charged."""
        orders, books = self._orders, self._books[slot]
        order = orders[slot] - (amount << TURN_BITS)
        assert order >= 0, f"slot {slot} has a load of {self.load(slot)}, not {amount} to give back"
        self.total -= amount
        orders[slot] = order
        books.requests -= 1
        books.tokens -= tokens
        if not self.available >> slot & 1:  # it never becomes unavailable here
            self._set_available(slot, books)

    def least_loaded(self, slots: int) -> Slot:
        """Of a non-empty set of open slots: the least loaded; of those, the least recently
        chosen."""
        if slots & (slots - 1) == 0:
            return Slot(slots.bit_length() - 1)
        return min(slots_of(slots), key=self.order)

    def least_recent(self, slots: int) -> Slot:
        """Of a non-empty set of open slots: the one chosen longest ago."""
        return min(slots_of(slots), key=self.turn)

    def _set_available(self, slot: Slot, books: _Books) -> None:
        if books.requests < books.limit and books.tokens < self._max_tokens:
            self.available |= 1 << slot
        else:
            self.available &= ~(1 << slot)

    def check(self) -> None:
        """Assert that the containers agree."""
        assert self.total == sum(map(self.load, self._books))
        assert self.num_open == len(self._books)
        assert self._books.keys() == self._orders.keys()
        for slot, books in self._books.items():
            assert 0 <= self.turn(slot) <= self._turn
            has_place = books.requests < books.limit and books.tokens < self._max_tokens
            assert bool(self.available >> slot & 1) == has_place
        assert self.available.bit_length() <= max(self._books, default=-1) + 1
