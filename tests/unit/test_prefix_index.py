"""The prefix index: depth, expiry, size, and slots that give no stale credit."""

from __future__ import annotations

import random
from itertools import accumulate

from homing.coordinator.loads import Slot, slots_of
from homing.coordinator.prefix_index import MAX_SLOTS, PrefixIndex, split_digests
from homing.coordinator.routing import Match
from homing.prefix import DIGEST_BYTES, block_hashes, routing_points

TTL = 100.0


def digests(*names: str) -> bytes:
    return b"".join(name.encode().ljust(DIGEST_BYTES, b".") for name in names)


def new_index(*, ttl_s: float = TTL, max_entries: int = 1000) -> PrefixIndex:
    return PrefixIndex(ttl_s=ttl_s, max_entries=max_entries, now=0.0)


def depths_of(index: PrefixIndex, chain: bytes, slots: int) -> dict[int, int]:
    """slot -> matched blocks, of a chain whose depths are 1, 2, 3, ..."""
    matches = index.match(chain, range(1, len(chain) // DIGEST_BYTES + 1), slots)
    assert sum(m.slots for m in matches) == slots, "the matches part the slots"
    return {slot: match.num_blocks for match in matches for slot in slots_of(match.slots)}


def num_dropped(index: PrefixIndex) -> int:
    return sum(generation.num_points for generation in index._dropped)


def test_an_unknown_prompt_matches_nothing_anywhere() -> None:
    assert new_index().match(digests("a", "b"), [1, 2], 0b11) == [Match(0, 0b11)]


def test_a_prompt_without_a_full_block_matches_nothing() -> None:
    assert new_index().match(b"", [], 0b11) == [Match(0, 0b11)]


def test_depth_is_graded_per_rank() -> None:
    index = new_index()
    index.record(digests("a", "b", "c"), Slot(0))
    index.record(digests("a", "b"), Slot(1))
    index.record(digests("a"), Slot(2))
    assert depths_of(index, digests("a", "b", "c", "d"), 0b1111) == {0: 3, 1: 2, 2: 1, 3: 0}


def test_depth_is_that_of_the_deepest_consecutive_routing_point() -> None:
    """Points may be far apart: two of the three points of a 48-block prompt are 16 and 32."""
    index = new_index()
    index.record(digests("a", "b"), Slot(0))
    assert index.match(digests("a", "b", "c"), [16, 32, 48], 0b1) == [Match(32, 0b1)]


def test_hashes_that_are_no_chain_spoil_nothing_but_their_own_matches() -> None:
    """A client may send anything: the matches part the ranks all the same."""
    random_ = random.Random(5)
    for max_entries in (10, 100, 10**6):
        index = new_index(max_entries=max_entries)
        for _ in range(1000):
            index.record(garbage(random_, alphabet="abcdefgh"), Slot(0))
            index.record(garbage(random_, alphabet="abcdefgh"), Slot(1))
            index.record(garbage(random_, alphabet="efghijkl"), Slot(2))
            held = depths_of(index, garbage(random_, alphabet="abcdefghijkl"), 0b1111)
            assert held.keys() == {0, 1, 2, 3}
            assert held[3] == 0


def test_a_prompt_that_agrees_at_the_end_of_a_run_and_not_before_is_no_riddle() -> None:
    """No chain of hashes does, and anybody may send it."""
    index = new_index()
    index.record(digests("a", "b", "c", "d"), Slot(0))
    index.record(digests("a", "x", "c", "d"), Slot(1))
    assert depths_of(index, digests("a", "b"), 0b11) == {0: 2, 1: 1}
    assert depths_of(index, digests("a", "x", "c", "d"), 0b11) == {0: 1, 1: 4}


def test_ranks_that_hold_as_much_in_different_generations_hold_as_much() -> None:
    index = new_index()
    index.record(digests("a", "ab"), Slot(0))
    index.advance(TTL / 2)
    index.record(digests("a", "ab"), Slot(1))
    assert index.match(digests("a", "ab"), [1, 2], 0b111) == [Match(2, 0b011), Match(0, 0b100)]


def test_what_a_rank_stored_and_dropped_parts_the_ranks_whatever_it_says() -> None:
    """Events may be lost, and come in an order that makes no sense."""
    random_ = random.Random(6)
    index = new_index(max_entries=200)
    acts = (index.record, index.store, index.drop)
    for step in range(3000):
        index.advance(step / 20)
        chain = garbage(random_, alphabet="abcdefghijkl")
        random_.choice(acts)(chain, Slot(random_.randrange(3)))
        held = depths_of(index, garbage(random_, alphabet="abcdefghijkl"), 0b1111)
        assert held.keys() == {0, 1, 2, 3}
        assert held[3] == 0


def test_a_dropped_block_is_believed_held_in_no_generation() -> None:
    index = new_index()
    index.record(digests("a", "ab", "abc"), Slot(0))
    index.record(digests("a", "ab", "abc"), Slot(1))
    index.advance(TTL / 2)
    index.record(digests("a", "ab", "abc"), Slot(0))
    index.drop(digests("abc", "ab"), Slot(0))
    assert depths_of(index, digests("a", "ab", "abc"), 0b11) == {0: 1, 1: 3}
    index.drop(digests("abc", "ab", "a"), Slot(1))
    index.drop(digests("a", "never heard of"), Slot(0))
    assert depths_of(index, digests("a", "ab", "abc"), 0b11) == {0: 0, 1: 0}
    assert index.num_entries == 0


def test_what_was_dropped_and_stored_again_is_believed_whole() -> None:
    """A drop that crosses a submission on the wire takes away what was just sent; what the engine
    then stores makes it good, though the last block never was in doubt."""
    index = new_index()
    index.record(digests("a", "ab", "abc"), Slot(0))
    index.drop(digests("ab", "a"), Slot(0))
    index.store(digests("a", "ab", "abc"), Slot(0))
    assert depths_of(index, digests("a", "ab", "abc"), 0b1) == {0: 3}


def test_what_is_stored_counts_towards_the_size_and_frees_what_was_dropped() -> None:
    index = new_index(max_entries=100)
    for number in range(1000):
        index.store(digests(f"{number}"), Slot(0))
        assert index.num_entries <= 100
        assert num_dropped(index) <= 100


def test_only_the_slots_asked_for_are_credited() -> None:
    index = new_index()
    index.record(digests("a"), Slot(0))
    index.record(digests("a"), Slot(1))
    assert index.match(digests("a"), [1], 0b10) == [Match(1, 0b10)]


def test_long_and_short_prompts_meet_at_the_same_points() -> None:
    tokens = b"".join(random.Random(1).randbytes(4) for _ in range(16 * 100))
    whole = block_hashes(tokens, 16)
    index = new_index()
    index.record(b"".join(whole[d - 1] for d in routing_points(100)), Slot(0))
    shared = b"".join(whole[d - 1] for d in routing_points(40))
    # 40 is a point of the short prompt alone; the deepest common one before it is 32.
    assert index.match(shared, routing_points(40), 0b1) == [Match(32, 0b1)]
    index.record(shared, Slot(0))
    assert index.match(shared, routing_points(40), 0b1) == [Match(40, 0b1)]


def test_what_nobody_repeats_expires_within_the_ttl() -> None:
    index = new_index()
    index.record(digests("a"), Slot(0))
    index.advance(TTL / 2)
    assert depths_of(index, digests("a"), 0b1) == {0: 1}
    index.advance(TTL)
    assert depths_of(index, digests("a"), 0b1) == {0: 0}
    assert index.num_entries == 0


def test_an_entry_lives_for_at_least_half_the_ttl_whenever_it_is_written() -> None:
    for written in (0.0, 10.0, 49.0, 51.0, 99.0):
        index = new_index()
        index.advance(written)
        index.record(digests("a"), Slot(0))
        index.advance(written + TTL / 2)
        assert depths_of(index, digests("a"), 0b1) == {0: 1}
        index.advance(written + TTL)
        assert depths_of(index, digests("a"), 0b1) == {0: 0}


def test_use_refreshes_an_entry() -> None:
    index = new_index()
    for step in range(20):
        index.advance(step * 40.0)
        index.record(digests("a"), Slot(0))
    assert depths_of(index, digests("a"), 0b1) == {0: 1}


def test_a_ranks_own_credit_expires_when_only_other_ranks_refresh_the_entry() -> None:
    index = new_index()
    index.record(digests("a"), Slot(0))
    for now in (30.0, 60.0, 90.0, 120.0):
        index.advance(now)
        index.record(digests("a"), Slot(1))
    assert depths_of(index, digests("a"), 0b11) == {0: 0, 1: 1}


def test_a_long_pause_of_the_clock_expires_everything_at_once() -> None:
    index = new_index(ttl_s=0.001)
    index.record(digests("a"), Slot(0))
    index.advance(1e6)
    assert index.num_entries == 0


def test_size_is_capped_and_the_newest_are_kept() -> None:
    index = new_index(max_entries=100)
    for number in range(10_000):
        index.record(digests(f"p{number}"), Slot(0))
        assert index.num_entries <= 100
    assert depths_of(index, digests("p9999"), 0b1) == {0: 1}
    assert depths_of(index, digests("p0"), 0b1) == {0: 0}


def test_dropped_generations_are_taken_apart_as_fast_as_entries_are_written() -> None:
    """Memory is bounded although nothing is freed at once."""
    index = new_index(max_entries=1000)
    for number in range(20_000):
        index.record(digests(f"p{number}"), Slot(0))
        assert num_dropped(index) <= 1000
    for number in range(1000):  # long ones drop more at each turn than they make runs
        names = [f"q{number}.{depth}" for depth in range(100)]
        index.record(digests(*names), Slot(0))
        assert num_dropped(index) <= 1000
    index.clear()
    index.advance(0.0)
    assert not index._dropped


def test_after_clear_no_rank_holds_anything() -> None:
    index = new_index()
    index.record(digests("a"), Slot(0))
    index.clear()
    assert depths_of(index, digests("a"), 0b1) == {0: 0}


def test_a_slot_is_not_used_again_while_an_entry_may_hold_its_bit() -> None:
    index = new_index()
    slot = index.open_slot()
    index.record(digests("a"), slot)
    index.close_slot(slot)
    seen = set()
    for now in range(0, 300, 10):
        index.advance(float(now))
        fresh = index.open_slot()
        assert fresh != slot or now >= TTL / 2
        assert depths_of(index, digests("a"), 1 << fresh) == {fresh: 0}
        seen.add(fresh)
        index.close_slot(fresh)
    assert slot in seen, "a slot comes back when its bits are gone"
    assert len(seen) < 30, "slots are used again, masks stay narrow"


def test_sessions_that_come_and_go_for_ever_do_not_widen_the_masks() -> None:
    index = new_index()
    for _ in range(3 * MAX_SLOTS):
        slot = index.open_slot()
        assert slot < MAX_SLOTS
        assert depths_of(index, digests("a"), 1 << slot)[slot] == 0
        index.record(digests("a"), slot)
        index.close_slot(slot)


def test_joined_digests_are_split_in_order() -> None:
    assert split_digests(b"") == ()
    assert split_digests(digests("a", "b", "c")) == (digests("a"), digests("b"), digests("c"))


class PlainIndex:
    """The same in the plainest way: each digest for itself, with the slots that have it."""

    def __init__(self) -> None:
        self.young: dict[tuple[bytes, int], None] = {}
        self.old: dict[tuple[bytes, int], None] = {}

    def record(self, chain: bytes, slot: int) -> None:
        self.young.update({(digest, slot): None for digest in split_digests(chain)})

    def drop(self, chain: bytes, slot: int) -> None:
        for digest in split_digests(chain):
            self.young.pop((digest, slot), None)
            self.old.pop((digest, slot), None)

    def turn(self) -> None:
        self.old, self.young = self.young, {}

    def depth_of(self, chain: bytes, slot: int) -> int:
        known = [(d, slot) in self.young or (d, slot) in self.old for d in split_digests(chain)]
        return (*known, False).index(False)

    @property
    def num_entries(self) -> int:
        return sum(len({digest for digest, _ in part}) for part in (self.young, self.old))


def garbage(random_: random.Random, *, alphabet: str) -> bytes:
    """Digests in any order, the same several times; mostly some."""
    return digests(*random_.choices(alphabet, k=random_.randint(0, 7)))


def random_chain(random_: random.Random, max_points: int = 9) -> bytes:
    """Few different ones. As with hashes, a name tells the whole prefix."""
    names = random_.choices("xy", weights=(4, 1), k=random_.randint(1, max_points))
    return digests(*accumulate(names))


def test_the_index_agrees_with_a_plain_one() -> None:
    """Random prompts of a small alphabet, ranks that come and go, time that passes."""
    random_ = random.Random(11)
    index, plain = new_index(ttl_s=40.0, max_entries=10**6), PlainIndex()
    live = [index.open_slot() for _ in range(4)]
    for step in range(4000):
        index.advance(step / 10)
        if step % 200 == 0 and step:
            plain.turn()
        chain = random_chain(random_)
        held = depths_of(index, chain, sum(1 << slot for slot in live))
        assert held == {slot: plain.depth_of(chain, slot) for slot in live}
        assert index.num_entries == plain.num_entries
        slot = random_.choice(live)
        index.record(chain, slot)
        plain.record(chain, slot)
        if random_.random() < 0.02:
            index.close_slot(slot)
            live.remove(slot)
            fresh = index.open_slot()
            assert fresh not in live
            assert all(depth == 0 for depth in depths_of(index, chain, 1 << fresh).values())
            live.append(fresh)


def test_the_index_agrees_with_a_plain_one_on_what_ranks_tell_of_themselves() -> None:
    """A rank tells what it stored, and later what it lost, the last blocks first."""
    random_ = random.Random(12)
    index, plain = new_index(ttl_s=40.0, max_entries=10**6), PlainIndex()
    told: list[tuple[bytes, Slot]] = []
    for step in range(4000):
        index.advance(step / 10)
        if step % 200 == 0 and step:
            plain.turn()
            told.clear()
        chain, slot = random_chain(random_), Slot(random_.randrange(3))
        index.record(chain, slot)
        plain.record(chain, slot)
        fate = random_.random()
        if fate < 0.4:
            index.store(chain, slot)
            plain.record(chain, slot)
            told.append((chain, slot))
        elif fate < 0.6 and told:
            chain, slot = told.pop(random_.randrange(len(told)))
            whole = split_digests(chain)
            # Longer prompts that go on from there are lost with it.
            longer = {d for (d, s) in (*plain.young, *plain.old) if s == slot}
            last = whole[-1].rstrip(b".")
            lost = sorted((d for d in longer if d.startswith(last)), key=len_of_name)[::-1]
            index.drop(b"".join(lost), slot)
            plain.drop(b"".join(lost), slot)
        chain = random_chain(random_)
        held = depths_of(index, chain, 0b111)
        assert held == {slot: plain.depth_of(chain, Slot(slot)) for slot in range(3)}


def len_of_name(digest: bytes) -> int:
    return len(digest.rstrip(b"."))


def test_a_prompt_that_nobody_sent_before_is_one_entry_of_the_maps() -> None:
    index = new_index()
    index.record(digests("a", "ab", "abc", "abcd"), Slot(0))
    index.record(digests("a", "ab", "abc", "abcd"), Slot(1))
    assert (index.num_entries, len(index._young.masks)) == (4, 1)
    index.record(digests("a", "ab", "abx"), Slot(1))
    assert (index.num_entries, len(index._young.masks)) == (5, 2), "it parts from a run it is in"
    index.record(digests("a", "ab"), Slot(2))
    assert (index.num_entries, len(index._young.masks)) == (5, 3), "this rank has its beginning"
    assert depths_of(index, digests("a", "ab", "abc", "abcd"), 0b111) == {0: 4, 1: 4, 2: 2}
    assert depths_of(index, digests("a", "ab", "abx"), 0b111) == {0: 2, 1: 3, 2: 2}
