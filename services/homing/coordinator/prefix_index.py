"""PrefixIndex: which ranks probably hold which prompt blocks, guessed from where prompts were sent.

    block hash -> set of rank slots, as a bit mask

A chain hash names the whole prefix, and a prompt's routing points are entered together: a rank that
is down for a point is down for all the points before it, in the same generation. So the ranks that
hold a prompt become fewer with its depth and never more.

**Runs**: points that follow one another and are held by the same ranks are one entry, the first
one's, as an edge of a radix tree: a prompt of 131,072 tokens that nobody sent before enters as one,
not as 170. A run parts where a rank comes to hold its beginning alone.

**Expiry** is by two generations. Writes go to the young one; after half the TTL the young becomes
the old, and the old is dropped. So what a rank was not sent for `ttl_s` is gone, run by run and
rank by rank, and what it was sent is known for at least half of that. A dropped generation is
taken apart a few runs at a time: two for each point written, and some at each `advance`.

**Size**: when the young generation holds half of `max_entries` points, the turn comes early.

**Corrections** come from engines that tell what they came to hold and what they lost. They lose a
block before the one it continues, so the rule above holds. Where it does not, because something was
never told, look-ups credit too much or too little, and that is all. They lose block by block: as
soon as one has told anything, all runs are parted into single points, and from then on prompts
enter as such and are looked up point by point, until the index is cleared.

**Slots** belong to one session of a rank. A closed slot is used again only when both generations
that may hold its bit are gone, so no rank inherits the credit of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from struct import Struct

from homing.coordinator.loads import Slot
from homing.coordinator.routing import Match
from homing.prefix import DIGEST_BYTES

MAX_SLOTS = 4096
"""Closed slots wait for expiry; if sessions come and go so fast that this many are in use, the
index is emptied instead, which frees them at once."""

FREED_PER_ADVANCE = 10_000
"""Runs of a dropped generation taken apart at each `advance`: a few milliseconds at most."""


@lru_cache(maxsize=1024)
def _digests_struct(num_digests: int) -> Struct:
    return Struct(f"{DIGEST_BYTES}s" * num_digests)


def split_digests(joined: bytes) -> tuple[bytes, ...]:
    """The digests that a block hashes frame joins. Its length must be a multiple of a digest's."""
    return _digests_struct(len(joined) // DIGEST_BYTES).unpack(joined)


class Runs:
    """One generation. All prompts are digests at routing points, joined."""

    def __init__(self) -> None:
        # Maps of bytes and ints, which the garbage collector does not look through.
        self.masks: dict[bytes, int] = {}
        """First digest of a run -> mask of the slots that have the run."""
        self._rests: dict[bytes, bytes] = {}
        """And -> the digests that follow it, where there are any."""
        self.num_points = 0

    def holders(self, digests: bytes) -> list[tuple[int, int]]:
        """Who holds how much of a prompt: ascending ends, in bytes, and the slots that hold all
        up to there. Each set is part of the one before it."""
        steps: list[tuple[int, int]] = []
        at, first = 0, digests[:DIGEST_BYTES]
        held = self.masks.get(first, 0)
        while held:
            at = self._end_of_common(digests, at, first)
            steps.append((at, held))
            if at == len(digests):
                break
            first = digests[at : at + DIGEST_BYTES]
            held &= self.masks.get(first, 0)
        return steps

    def is_run(self, digests: bytes, bit: int) -> bool:
        """Whether a prompt is one run that the slot of this bit has: what is sent again is."""
        first = digests[:DIGEST_BYTES]
        if not self.masks.get(first, 0) & bit:
            return False
        return self._rests.get(first, b"") == digests[DIGEST_BYTES:]

    def add(self, digests: bytes, bit: int) -> int:
        """The slot of this bit was sent a prompt. Returns how many points are new."""
        masks, at, before = self.masks, 0, self.num_points
        while at < len(digests):
            first = digests[at : at + DIGEST_BYTES]
            mask = masks.get(first)
            if mask is None:
                self._put(first, digests[at + DIGEST_BYTES :], bit)
                break
            if mask & bit:
                at = self._end_of_common(digests, at, first)
            else:
                at = self._end_of_common(digests, at, first, part=True)
                masks[first] = mask | bit
        return self.num_points - before

    def add_apart(self, digests: Sequence[bytes], slots: int) -> None:
        """These slots have these digests; each enters for itself."""
        masks = self.masks
        for digest in digests:
            self.num_points += digest not in masks
            masks[digest] = masks.get(digest, 0) | slots

    def part(self) -> None:
        """Make single points of all runs."""
        while self._rests:
            first, rest = self._rests.popitem()
            followers = split_digests(rest)
            self.num_points -= len(followers)
            self.add_apart(followers, self.masks[first])

    def remove_apart(self, digests: Sequence[bytes], bit: int) -> None:
        """The slot of this bit has these no more. There must be no runs of several points."""
        masks = self.masks
        for digest in digests:
            mask = masks.get(digest, 0)
            if mask == bit:
                del masks[digest]
                self.num_points -= 1
            elif mask & bit:
                masks[digest] = mask ^ bit

    def take_apart(self, num_runs: int) -> None:
        """Forget so many runs, the youngest; there must be as many."""
        masks, rests = self.masks, self._rests
        for _ in range(num_runs):
            rests.pop(masks.popitem()[0], None)

    def _put(self, first: bytes, rest: bytes, mask: int) -> None:
        self.masks[first] = mask
        if rest:
            self._rests[first] = rest
        self.num_points += 1 + len(rest) // DIGEST_BYTES

    def _end_of_common(self, digests: bytes, at: int, first: bytes, part: bool = False) -> int:
        """Where a prompt and the run that they both have at `at` cease to agree, in bytes.

        With `part` the run ends there from now on, and what followed becomes another.
        """
        at += DIGEST_BYTES
        rest = self._rests.get(first)
        if rest is None:
            return at
        if digests.startswith(rest, at):
            return at + len(rest)
        # Equal digests have equal ones before them: bisection. That the whole rest does not agree
        # is known; in hashes that are no chain its last digest may all the same.
        low, high = 0, min(len(rest) - DIGEST_BYTES, len(digests) - at) // DIGEST_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * DIGEST_BYTES
            if digests.startswith(rest[end - DIGEST_BYTES : end], at + end - DIGEST_BYTES):
                low = middle
            else:
                high = middle - 1
        cut = low * DIGEST_BYTES
        if part:
            self._cut(first, rest, cut)
        return at + cut

    def _cut(self, first: bytes, rest: bytes, cut: int) -> None:
        if cut:
            self._rests[first] = rest[:cut]
        else:
            del self._rests[first]
        self.num_points -= (len(rest) - cut) // DIGEST_BYTES
        next_first, back = rest[cut : cut + DIGEST_BYTES], rest[cut + DIGEST_BYTES :]
        if next_first not in self.masks:  # it is not, unless the hashes are no chain
            self._put(next_first, back, self.masks[first])


class PrefixIndex:
    def __init__(self, *, ttl_s: float, max_entries: int, now: float) -> None:
        self._period_s = ttl_s / 2
        self._max_young = max(1, max_entries // 2)
        self._turns_at = now + self._period_s
        self._young, self._old = Runs(), Runs()
        self._dropped: deque[Runs] = deque()  # being taken apart
        self._is_told = False  # by some engine, of what it holds
        self._free_slots: list[Slot] = []  # a heap: low slots keep the masks narrow
        self._closed_before: list[Slot] = []  # free after the next turn
        self._closed: list[Slot] = []  # free after the turn after it
        self._num_slots = 0

    @property
    def num_entries(self) -> int:
        """Points held, those that are in both generations counted twice."""
        return self._young.num_points + self._old.num_points

    def match(self, digests: bytes, depths: Sequence[int], slots: int) -> list[Match]:
        """Part `slots` by how much of the prompt each holds; who holds most first.

        The i-th of the joined digests is the hash of the prompt's block `depths[i] - 1`; the depths
        ascend.
        """
        steps = self._young.holders(digests) + self._old.holders(digests)
        if not steps:
            return [Match(0, slots)]
        if len(steps) > 1:
            steps.sort(reverse=True)
        matches: list[Match] = []
        last_end = 0
        for end, held in steps:  # the deepest first
            if held := held & slots:
                slots ^= held
                if end == last_end:
                    held |= matches.pop().slots
                matches.append(Match(depths[end // DIGEST_BYTES - 1], held))
                last_end = end
        if slots:
            matches.append(Match(0, slots))
        return matches

    def record(self, digests: bytes, slot: Slot) -> None:
        """A prompt of these blocks was sent to `slot`."""
        if self._is_told:
            if not self._young.masks.get(digests[-DIGEST_BYTES:], 0) >> slot & 1:
                self.store(digests, slot)
        elif not self._young.is_run(digests, 1 << slot):
            self._written(self._young.add(digests, 1 << slot))

    def store(self, digests: bytes, slot: Slot) -> None:
        """`slot` holds these blocks of a prompt, by its own word."""
        self._part_runs()
        apart = split_digests(digests)
        self._young.add_apart(apart, 1 << slot)
        self._written(len(apart))

    def drop(self, digests: bytes, slot: Slot) -> None:
        """`slot` holds these blocks no more, by its own word."""
        self._part_runs()
        apart = split_digests(digests)
        for generation in (self._young, self._old):
            generation.remove_apart(apart, 1 << slot)

    def advance(self, now: float) -> None:
        """Let time pass: expire what is due. Call it often."""
        while now >= self._turns_at:
            self._turn()
            self._turns_at += self._period_s
            if not self.num_entries:
                self._turns_at = max(self._turns_at, now + self._period_s)
        self._take_apart(FREED_PER_ADVANCE)

    def clear(self) -> None:
        """Forget everything: no rank holds anything."""
        self._turn()
        self._turn()
        self._is_told = False

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

    def _part_runs(self) -> None:
        """Once, and soon: where engines tell, they do from their first second on."""
        if not self._is_told:
            self._is_told = True
            self._young.part()
            self._old.part()

    def _written(self, num_points: int) -> None:
        if self._dropped:
            self._take_apart(2 * num_points)
        if self._young.num_points >= self._max_young:
            self._turn()

    def _turn(self) -> None:
        if self._old.masks:
            self._dropped.append(self._old)
        self._old, self._young = self._young, Runs()
        for slot in self._closed_before:
            heappush(self._free_slots, slot)
        self._closed_before, self._closed = self._closed, []

    def _take_apart(self, num_runs: int) -> None:
        while self._dropped and num_runs > 0:
            generation = self._dropped[0]
            num_now = min(num_runs, len(generation.masks))
            generation.take_apart(num_now)
            num_runs -= num_now
            if not generation.masks:
                self._dropped.popleft()
