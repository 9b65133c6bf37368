"""PrefixIndex: which ranks probably hold which prompt blocks, guessed from where prompts were sent.

    block hash -> set of rank slots, as a bit mask

A chain hash names the whole prefix, and a prompt's routing points are entered together: a rank that
is down for a point is down for all the points before it, in the same generation. So the ranks that
hold a prompt become fewer with its depth and never more, and where they do is found by bisection: a
prompt of 131,072 tokens has 170 points, of which a look-up reads two to ten.

**Expiry** is by two generations. Writes go to the young one; after half the TTL the young becomes
the old, and the old is dropped. So what a rank was not sent for `ttl_s` is gone, entry by entry and
rank by rank, and what it was sent is known for at least half of that. A dropped generation is
taken apart a few entries at a time: two for each entry written, and some at each `advance`.

**Size**: when the young generation holds half of `max_entries`, the turn comes early.

**Corrections** come from engines that tell what they came to hold and what they lost. They lose a
block before the one it continues, so the rule above holds. Where it does not, because something was
never told, look-ups credit too much or too little, and that is all.

**Slots** belong to one session of a rank. A closed slot is used again only when both generations
that may hold its bit are gone, so no rank inherits the credit of another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import repeat
from struct import Struct

from homing.coordinator.loads import Slot
from homing.coordinator.routing import Match
from homing.prefix import DIGEST_BYTES

MAX_SLOTS = 4096
"""Closed slots wait for expiry; if sessions come and go so fast that this many are in use, the
index is emptied instead, which frees them at once."""

FREED_PER_ADVANCE = 10_000
"""Entries of a dropped generation taken apart at each `advance`: about a millisecond."""


@lru_cache(maxsize=1024)
def _digests_struct(num_digests: int) -> Struct:
    return Struct(f"{DIGEST_BYTES}s" * num_digests)


def split_digests(frame: bytes) -> tuple[bytes, ...]:
    """The digests that a block hashes frame joins. Its length must be a multiple of a digest's."""
    return _digests_struct(len(frame) // DIGEST_BYTES).unpack(frame)


class PrefixIndex:
    def __init__(self, *, ttl_s: float, max_entries: int, now: float) -> None:
        self._period_s = ttl_s / 2
        self._max_young = max(1, max_entries // 2)
        self._turns_at = now + self._period_s
        self._young: dict[bytes, int] = {}  # block hash -> mask of slots
        self._old: dict[bytes, int] = {}
        self._dropped: deque[dict[bytes, int]] = deque()  # being taken apart
        self._free_slots: list[Slot] = []  # a heap: low slots keep the masks narrow
        self._closed_before: list[Slot] = []  # free after the next turn
        self._closed: list[Slot] = []  # free after the turn after it
        self._num_slots = 0

    @property
    def num_entries(self) -> int:
        """Entries held, those that are in both generations counted twice."""
        return len(self._young) + len(self._old)

    def match(self, digests: Sequence[bytes], depths: Sequence[int], slots: int) -> list[Match]:
        """Part `slots` by how much of the prompt each holds.

        `digests[i]` is the hash of the prompt's block `depths[i] - 1`, ascending.
        """
        if not digests:
            return [Match(0, slots)]
        held = self._holders(digests[0]) & slots
        if not held:  # tried first: most ranks hold nothing of a prompt
            return [Match(0, slots)]
        matches = [] if held == slots else [Match(0, slots ^ held)]
        at_end = self._holders(digests[-1]) & held
        if held != at_end:
            parts, at_end = self._part(digests, depths, held, at_end)
            matches += parts
        if at_end:
            matches.append(Match(depths[-1], at_end))
        return matches

    def _part(
        self, digests: Sequence[bytes], depths: Sequence[int], held: int, at_end: int
    ) -> tuple[list[Match], int]:
        """Part those that hold the first point, `held`, and not the last; and who is left there."""

        def fewer_hold(digest: bytes) -> bool:
            return self._holders(digest) & held != held

        matches: list[Match] = []
        point = 1  # `held` is who holds all points before it
        while held != at_end:
            # The next that fewer hold is one of these, or the last.
            point = bisect_left(digests, True, point, len(digests) - 1, key=fewer_hold)
            left = self._holders(digests[point]) & held
            matches.append(Match(depths[point - 1], held ^ left))
            held, at_end, point = left, at_end & left, point + 1
        return matches, at_end

    def _holders(self, digest: bytes) -> int:
        return self._young.get(digest, 0) | self._old.get(digest, 0)

    def record(self, digests: Sequence[bytes], slot: Slot) -> None:
        """A prompt of these blocks was sent to `slot`; there is at least one."""
        young, bit = self._young, 1 << slot
        if digests[0] not in young:  # then nor is any other
            young.update(zip(digests, repeat(bit)))  # one call
        elif young.get(digests[-1], 0) & bit:
            return
        else:
            held = bisect_left(digests, True, key=lambda digest: not young.get(digest, 0) & bit)
            for digest in digests[held:]:
                young[digest] = young.get(digest, 0) | bit
        self._written(len(digests))

    def store(self, digests: Sequence[bytes], slot: Slot) -> None:
        """`slot` holds these blocks of a prompt, by its own word.

        Unlike `record` it writes them all: some may have been taken away since they were sent.
        """
        young, bit = self._young, 1 << slot
        for digest in digests:
            young[digest] = young.get(digest, 0) | bit
        self._written(len(digests))

    def drop(self, digests: Sequence[bytes], slot: Slot) -> None:
        """`slot` holds these blocks no more, by its own word."""
        bit = 1 << slot
        for generation in (self._young, self._old):
            for digest in digests:
                mask = generation.get(digest, 0)
                if mask == bit:
                    del generation[digest]
                elif mask & bit:
                    generation[digest] = mask ^ bit

    def advance(self, now: float) -> None:
        """Let time pass: expire what is due. Call it often."""
        while now >= self._turns_at:
            self._turn()
            self._turns_at += self._period_s
            if not self._young and not self._old:
                self._turns_at = max(self._turns_at, now + self._period_s)
        self._take_apart(FREED_PER_ADVANCE)

    def clear(self) -> None:
        """Forget everything: no rank holds anything."""
        self._turn()
        self._turn()

    def open_slot(self) -> Slot:
        """A slot whose bit no entry holds."""
        if not self._free_slots and self._num_slots >= MAX_SLOTS:
            self.clear()
        if self._free_slots:
            return heappop(self._free_slots)
        self._num_slots += 1
        return Slot(self._num_slots - 1)

    def close_slot(self, slot: Slot) -> None:
        """The session that had this slot is over."""
        self._closed.append(slot)

    def _written(self, num_entries: int) -> None:
        if self._dropped:
            self._take_apart(2 * num_entries)
        if len(self._young) >= self._max_young:
            self._turn()

    def _turn(self) -> None:
        if self._old:
            self._dropped.append(self._old)
        self._old, self._young = self._young, {}
        for slot in self._closed_before:
            heappush(self._free_slots, slot)
        self._closed_before, self._closed = self._closed, []

    def _take_apart(self, num_entries: int) -> None:
        while self._dropped and num_entries > 0:
            generation = self._dropped[0]
            for _ in range(min(num_entries, len(generation))):
                generation.popitem()
                num_entries -= 1
            if not generation:
                self._dropped.popleft()
