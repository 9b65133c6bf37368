"""Aborts at the coordinator: of one request, of a name's, of all; each ends once."""

from __future__ import annotations

import pytest

from homing.wire import Abort, AbortMatched, AbortMatching, FinishReason, LostReason
from tests.support.coordinator_fleet import Fleet, joined_fleet, lost, output, submit, to


@pytest.fixture
def fleet() -> Fleet:
    """One client, two engines."""
    return joined_fleet()


def test_an_abort_is_forwarded_and_its_end_comes_from_the_engine(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert fleet.say(b"c1", Abort(1, 1, 0)) == [(b"e0", Abort(1, 1, 0))]
    assert fleet.loads == {0: 1, 1: 0}
    ended = output((1, 0), reason=FinishReason.ABORT)
    assert fleet.say(b"e0", ended) == [(b"c1", ended)]
    assert fleet.loads == {0: 0, 1: 0}


def test_an_abort_told_twice_reaches_the_engine_once(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.say(b"c1", Abort(1, 1, 0))
    assert fleet.say(b"c1", Abort(1, 1, 0)) == []


def test_an_abort_of_what_is_not_alive_is_answered_so_that_nobody_waits(fleet: Fleet) -> None:
    assert lost(fleet.say(b"c1", Abort(1, 7, 0))) == [(7, 0, LostReason.INVALID)]
    fleet.say(b"c1", submit())
    assert lost(fleet.say(b"c1", Abort(1, 1, 3))) == [(1, 3, LostReason.INVALID)]


def test_an_abort_of_an_earlier_attempt_is_ignored(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(attempt=2))
    assert fleet.say(b"c1", Abort(1, 1, 1)) == []


def test_an_abort_in_another_clients_name_is_garbage(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit())
    assert fleet.say(b"c2", Abort(1, 1, 0)) == []
    assert fleet.stats()["garbage"] == 1


def test_an_aborting_request_whose_engine_dies_still_ends(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.say(b"c1", Abort(1, 1, 0))
    assert lost(fleet.fail(b"e0")) == [(1, 0, LostReason.ABORTED)]
    assert fleet.loads == {1: 0}


def test_requests_are_aborted_by_their_outside_name_whichever_client_submitted_them(
    fleet: Fleet,
) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit(external_digest=7))
    fleet.say(b"c1", submit(request_id=2, external_digest=8))
    fleet.say(b"c1", submit(request_id=3))
    fleet.say(b"c2", submit(client=2, request_id=9, external_digest=7))
    sent = fleet.say(b"c2", AbortMatching(5, 7))
    assert to(b"c2", sent) == [AbortMatched(5, 2)]
    aborts = [message for _, message in sent if isinstance(message, Abort)]
    assert sorted((a.client, a.request_id) for a in aborts) == [(1, 1), (2, 9)]
    again = fleet.say(b"c2", AbortMatching(6, 7))
    assert again == [(b"c2", AbortMatched(6, 2))]  # their engines know
    fleet.say(b"e0", output((1, 0)))
    fleet.say(b"e1", output((1, 0)))
    assert to(b"c2", fleet.say(b"c2", AbortMatching(7, 7))) == [AbortMatched(7, 1)]


def test_all_requests_of_the_fleet_are_aborted_at_once(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit(external_digest=7))
    fleet.say(b"c2", submit(client=2, request_id=9))
    sent = fleet.say(b"c2", AbortMatching(5, None))
    assert to(b"c2", sent) == [AbortMatched(5, 2)]
    assert len([message for _, message in sent if isinstance(message, Abort)]) == 2


def test_nothing_to_abort_is_said_to_be_nothing(fleet: Fleet) -> None:
    assert fleet.say(b"c1", AbortMatching(5, 7)) == [(b"c1", AbortMatched(5, 0))]
    assert fleet.say(b"c1", AbortMatching(5, None)) == [(b"c1", AbortMatched(5, 0))]
