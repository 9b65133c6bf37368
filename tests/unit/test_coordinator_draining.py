"""A rank that drains: no new work, a bounded time for the old, then the rest goes elsewhere."""

from __future__ import annotations

import math

import pytest

from homing.wire import Drain, Drained, Goodbye, Lost, LostReason, Submit
from tests.support.coordinator_fleet import (
    Fleet,
    engine_hello,
    joined_fleet,
    kinds,
    output,
    submit,
    to,
)


def two_ranks() -> Fleet:
    return joined_fleet(policy="round_robin")


def ranks_of_submissions(fleet: Fleet, *numbers: int) -> set[bytes]:
    sent = [each for n in numbers for each in fleet.say(b"c1", submit(request_id=n))]
    return {peer for peer, message in sent if isinstance(message, Submit)}


def test_a_rank_that_is_drained_gets_no_more_requests_and_learns_that_none_follows() -> None:
    fleet = two_ranks()
    assert fleet.say(b"c1", Drain(7, 1, 30.0)) == [(b"e1", Drain(0, None, 30.0))]
    assert ranks_of_submissions(fleet, *range(6)) == {b"e0"}
    assert fleet.stats()["ranks"][1]["leaving"]


def test_who_asked_is_answered_when_the_rank_has_gone_and_its_rest_goes_elsewhere() -> None:
    fleet = two_ranks()
    assert ranks_of_submissions(fleet, 1, 2) == {b"e0", b"e1"}
    fleet.say(b"c1", Drain(7, 1, 0.0))
    sent = fleet.say(b"e1", Goodbye())
    [rest] = [message for message in to(b"c1", sent) if isinstance(message, Lost)]
    assert rest.reason is LostReason.RANK_LEFT
    assert Drained(7, True) in to(b"c1", sent)
    assert fleet.stats()["lost_ranks"] == 0
    assert ranks_of_submissions(fleet, 3) == {b"e0"}


def test_what_a_draining_rank_finishes_reaches_its_client() -> None:
    fleet = two_ranks()
    ranks_of_submissions(fleet, 1, 2)
    [busy] = [n for n in (1, 2) if any(r.request_id == n for r in _requests(fleet, 1))]
    fleet.say(b"c1", Drain(7, 1, 30.0))
    assert kinds(fleet.say(b"e1", output((busy, 0)))) == [(b"c1", "Output")]
    assert fleet.loads == {0: 1, 1: 0}


def _requests(fleet: Fleet, rank: int) -> set:
    return next(e for e in fleet.coordinator.peers.engines if e.rank == rank).requests


def test_an_engine_may_ask_to_leave_by_itself() -> None:
    fleet = two_ranks()
    assert fleet.say(b"e0", Drain(0, None, 5.0)) == [(b"e0", Drain(0, None, 5.0))]
    assert ranks_of_submissions(fleet, *range(4)) == {b"e1"}


def test_the_last_rank_may_be_drained_too_and_then_all_is_refused() -> None:
    fleet = two_ranks()
    for number in (0, 1):
        fleet.say(b"c1", Drain(number, number, 5.0))
    [refusal] = to(b"c1", fleet.say(b"c1", submit()))
    assert isinstance(refusal, Lost)
    assert refusal.reason is LostReason.OVERLOADED


def test_a_successor_of_a_drained_rank_gets_work() -> None:
    fleet = two_ranks()
    fleet.say(b"c1", Drain(7, 1, 5.0))
    fleet.say(b"e1", Goodbye())
    fleet.say(b"e-new", engine_hello(300, 1))
    assert ranks_of_submissions(fleet, *range(4)) == {b"e0", b"e-new"}


def test_a_draining_rank_that_dies_is_answered_as_such() -> None:
    fleet = two_ranks()
    fleet.say(b"c1", Drain(7, 1, 5.0))
    [done] = [m for m in to(b"c1", fleet.fail(b"e1")) if isinstance(m, Drained)]
    assert not done.ok
    assert "rank 1 did not leave" in done.detail


def test_two_who_ask_are_both_answered() -> None:
    fleet = two_ranks()
    fleet.join_client(2)
    fleet.say(b"c1", Drain(7, 1, 5.0))
    fleet.say(b"c2", Drain(8, 1, 2.0))
    sent = fleet.say(b"e1", Goodbye())
    assert Drained(7, True) in to(b"c1", sent)
    assert Drained(8, True) in to(b"c2", sent)


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        (Drain(7, 9, 5.0), "there is no rank 9"),
        (Drain(7, 1, -1.0), "timeout_s is -1.0"),
        (Drain(7, 1, math.inf), "timeout_s is inf"),
        (Drain(7, 1, math.nan), "timeout_s is nan"),
    ],
)
def test_what_cannot_be_drained_is_answered_at_once(message: Drain, detail: str) -> None:
    fleet = two_ranks()
    [(peer, done)] = fleet.say(b"c1", message)
    assert peer == b"c1"
    assert isinstance(done, Drained)
    assert not done.ok
    assert done.detail.startswith(detail)
