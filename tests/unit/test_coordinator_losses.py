"""Requests whose engine or client is gone: who is told, and what is freed."""

from __future__ import annotations

import pytest

from homing.wire import Abort, Heartbeat, LostReason
from tests.support.coordinator_fleet import (
    Failure,
    Fleet,
    client_hello,
    engine_hello,
    joined_fleet,
    kinds,
    lost,
    output,
    submit,
    to,
    tokens,
)


@pytest.fixture
def fleet() -> Fleet:
    """One client, two engines."""
    return joined_fleet()


def test_each_client_is_told_of_each_request_of_a_lost_rank(fleet: Fleet) -> None:
    fleet.join_client(2)
    prompt = tokens(1)
    fleet.say(b"c1", submit(1, 1, prompt=prompt))  # e0
    fleet.say(b"c1", submit(1, 2, prompt=prompt))  # e1
    fleet.say(b"c2", submit(2, 1, prompt=prompt))  # e0
    sent = fleet.fail(b"e0")
    assert lost(sent, b"c1") == [(1, 0, LostReason.RANK_LOST)]
    assert lost(sent, b"c2") == [(1, 0, LostReason.RANK_LOST)]
    assert fleet.loads == {1: 1}


def test_a_request_can_be_submitted_again_after_its_rank_was_lost(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.fail(b"e0")
    again = submit(attempt=1, num_resumed_tokens=2)
    assert kinds(fleet.say(b"c1", again)) == [(b"e1", "Submit")]


def test_a_clients_requests_are_aborted_on_their_engines_when_it_is_gone(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1, hashed=False))
    fleet.say(b"c1", submit(request_id=2, hashed=False))
    assert fleet.fail(b"c1") == [(b"e0", Abort(1, 1, 0)), (b"e1", Abort(1, 2, 0))]
    assert fleet.loads == {0: 0, 1: 0}
    assert fleet.say(b"e0", output((1, 0))) == []


def test_a_client_that_does_not_read_is_cut_off_and_nobody_else_notices(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit(1, 1))
    fleet.say(b"c2", submit(2, 1))
    assert fleet.fail(b"c1", Failure.FULL) == [(b"e0", Abort(1, 1, 0))]
    assert fleet.say(b"e1", output((1, 0), client=2)) == [(b"c2", output((1, 0), client=2))]
    assert kinds(fleet.say(b"c1", Heartbeat(0))) == [(b"c1", "Rejoin")]


def test_an_engine_that_does_not_read_is_lost(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert lost(fleet.fail(b"e0", Failure.FULL)) == [(1, 0, LostReason.RANK_LOST)]


def test_an_engine_that_says_hello_again_has_lost_its_requests(fleet: Fleet) -> None:
    """What it was given after it spoke it has not dropped: it is told to."""
    fleet.say(b"c1", submit())
    sent = fleet.say(b"e0", engine_hello(100, 0, incarnation=1))
    assert lost(sent) == [(1, 0, LostReason.RANK_LEFT)]
    assert [type(m).__name__ for m in to(b"e0", sent)] == ["Welcome", "Abort"]
    assert fleet.loads == {0: 0, 1: 0}
    fleet.say(b"e0", output((1, 0)))
    assert fleet.loads == {0: 0, 1: 0}


def test_a_client_that_says_hello_again_is_told_that_its_requests_are_over(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    sent = fleet.say(b"c1", client_hello(1, incarnation=1))
    assert to(b"e0", sent) == [Abort(1, 1, 0)]
    assert lost(sent) == [(1, 0, LostReason.RANK_LEFT)]
    assert fleet.loads == {0: 0, 1: 0}


def test_a_rank_that_comes_back_has_no_credit_for_what_it_held(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1))
    fleet.say(b"e0", output((1, 0)))
    fleet.fail(b"e0")
    fleet.join_engine(2, rank=0)
    fleet.say(b"c1", submit(request_id=2))
    fleet.say(b"e2", output((2, 0)))
    fleet.say(b"e1", output((2, 0)))
    assert fleet.stats()["predicted_cached_tokens"] == 0
