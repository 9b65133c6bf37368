"""KvEvents at the coordinator, by literal events: the guess of what a rank holds is corrected."""

from __future__ import annotations

from typing import Any

import pytest

from homing.coordinator.kv_events import MAX_DIGESTS
from homing.prefix import routing_hashes
from homing.wire import Control, FleetState, KvEvents, Message, Pause, Submit, pack_payload
from homing.wire.commands import Command
from tests.support.coordinator_fleet import BLOCK_SIZE, Fleet, joined_fleet, output, submit, tokens

PROMPT = tokens(*range(17))  # of four blocks
HASHES = routing_hashes(PROMPT, BLOCK_SIZE)


def fleet_of_two(**settings: Any) -> Fleet:
    """Idle ranks, of which rank 1 was chosen least recently: who knows nothing chooses it."""
    return joined_fleet(**settings)


def chosen(fleet: Fleet, request_id: int, prompt: bytes = PROMPT) -> bytes:
    """Where a prompt goes; the request ends at once."""
    [(rank, message)] = fleet.say(b"c1", submit(request_id=request_id, prompt=prompt))
    assert isinstance(message, Submit)
    fleet.say(rank, output((request_id, 0)))
    return rank


def stored(*chains: bytes) -> KvEvents:
    return KvEvents(len(chains), 0, stored=pack_payload(list(chains)))


def dropped(digests: bytes) -> KvEvents:
    return KvEvents(0, len(digests) // 16, dropped=digests)


def cached_guess(fleet: Fleet) -> int:
    return fleet.coordinator.totals.predicted_cached_tokens


def test_a_rank_gets_the_prompts_of_which_it_says_that_it_holds_them() -> None:
    fleet = fleet_of_two()
    assert fleet.say(b"e1", stored(HASHES)) == []
    assert [chosen(fleet, n) for n in range(4)] == [b"e1"] * 4
    assert cached_guess(fleet) == 4 * 16


def test_a_rank_has_no_credit_for_what_it_says_that_it_lost() -> None:
    fleet = fleet_of_two()
    assert chosen(fleet, 1) == b"e0"
    fleet.say(b"e0", dropped(HASHES))
    assert chosen(fleet, 2) == b"e1"
    assert cached_guess(fleet) == 0


def test_who_lost_the_end_of_a_prompt_has_credit_for_its_beginning() -> None:
    fleet = fleet_of_two()
    chosen(fleet, 1)
    fleet.say(b"e0", dropped(HASHES[48:] + HASHES[32:48]))
    assert chosen(fleet, 2) == b"e0"
    assert cached_guess(fleet) == 8


def test_of_one_message_what_is_stored_comes_before_what_is_dropped() -> None:
    fleet = fleet_of_two()
    both = KvEvents(1, 1, stored=pack_payload([HASHES]), dropped=HASHES[48:])
    fleet.say(b"e1", both)
    assert chosen(fleet, 1) == b"e1"
    assert cached_guess(fleet) == 12


def test_what_one_rank_lost_another_still_holds() -> None:
    fleet = fleet_of_two()
    fleet.say(b"e0", stored(HASHES))
    fleet.say(b"e1", stored(HASHES))
    fleet.say(b"e0", dropped(HASHES))
    assert chosen(fleet, 1) == b"e1"


def test_what_is_counted_is_in_the_snapshot() -> None:
    fleet = fleet_of_two()
    fleet.say(b"e0", stored(HASHES, HASHES[:16]))
    fleet.say(b"e0", dropped(HASHES[48:]))
    [rank] = {chosen(fleet, 1)}
    fleet.say(b"c1", submit(request_id=2, prompt=PROMPT))
    fleet.say(rank, output((2, 0), num_cached_tokens=4))
    snapshot = fleet.coordinator.snapshot(0.0)
    assert (snapshot["kv_stored"], snapshot["kv_dropped"]) == (5, 1)
    assert snapshot["predicted_cached_tokens"] == 12 + 16
    assert snapshot["actual_cached_tokens"] == 4
    assert snapshot["mispredicted_cached_tokens"] == 12 + 12


@pytest.mark.parametrize(
    "broken",
    [
        KvEvents(1, 0, stored=b"\xc1"),
        KvEvents(1, 0, stored=pack_payload([7])),
        KvEvents(2, 0, stored=pack_payload([HASHES])),
        KvEvents(1, 0, stored=pack_payload([HASHES[:-1]])),
        KvEvents(1, 1, stored=pack_payload([HASHES]), dropped=b"x" * 15),
        KvEvents(1, 2, stored=pack_payload([HASHES]), dropped=b"x" * 16),
        KvEvents(1, 0, stored=pack_payload([b"x" * 16 * (MAX_DIGESTS + 1)])),
        KvEvents(0, MAX_DIGESTS + 1, dropped=b"x" * 16 * (MAX_DIGESTS + 1)),
    ],
)
def test_what_cannot_be_read_changes_nothing_and_is_counted(broken: KvEvents) -> None:
    fleet = fleet_of_two()
    assert fleet.say(b"e1", broken) == []
    assert fleet.coordinator.totals.garbage == 1
    assert fleet.coordinator.index.num_entries == 0


def test_a_client_cannot_speak_for_a_rank() -> None:
    fleet = fleet_of_two()
    assert fleet.say(b"c1", stored(HASHES)) == []
    assert fleet.coordinator.totals.garbage == 1
    assert fleet.coordinator.index.num_entries == 0


def test_a_rank_that_has_not_caught_up_has_no_credit() -> None:
    fleet = fleet_of_two()
    pause: Message = Control(Command.PAUSE, 1, pack_payload(Pause()))
    fleet.say(b"c1", pause)
    fleet.join_engine(2, state=FleetState.RUNNING)
    fleet.say(b"e2", stored(HASHES))
    assert fleet.coordinator.index.num_entries == 0


def test_a_policy_that_reads_no_prefixes_keeps_none() -> None:
    fleet = fleet_of_two(policy="load_balanced")
    assert fleet.say(b"e1", stored(HASHES)) == []
    assert fleet.coordinator.index.num_entries == 0
    assert fleet.coordinator.totals.garbage == 0
