"""How an engine joins a fleet, leaves it and comes back: literal messages, a clock of numbers."""

from __future__ import annotations

import pytest

from homing.engine.session import SILENCE_S, EngineSession
from homing.errors import ConfigError, Unavailable
from homing.wire import Drain, Heartbeat, Hello, ModelCard, Refused, Rejoin, Role, read_payload
from tests.support.engine_session import joined, kinds, make_session, step, submit, welcome
from tests.support.fake_model import make_engine
from tests.support.scripted_worker import CARD

# Joining


def test_a_hello_says_who_the_engine_is():
    engine, _ = make_engine()
    session = EngineSession(engine, CARD, uid=7, rank=3, join_timeout_s=60.0)
    [hello] = session.start(0.0)
    assert isinstance(hello, Hello)
    assert (hello.role, hello.uid, hello.rank, hello.incarnation) == (Role.ENGINE, 7, 3, 0)
    assert read_payload(hello.model_card or b"", ModelCard) == CARD


def test_hello_is_repeated_less_and_less_often_until_the_coordinator_answers():
    session, _ = make_session()
    times = [now / 2 for now in range(40) if session.tick(now / 2)]
    assert times == [1.0, 3.0, 7.0, 15.0]


def test_an_engine_that_nobody_answers_gives_up():
    session, _ = make_session()
    session.tick(60.0)
    with pytest.raises(Unavailable, match="no coordinator answered in 75 s"):
        session.tick(75.0)


def test_a_welcome_starts_heartbeats():
    session, _ = make_session()
    assert kinds(session.handle(welcome(), 1.0)) == [Heartbeat]
    assert session.tick(1.4) == []
    assert kinds(session.tick(1.5)) == [Heartbeat]
    assert session.next_tick == 2.0


def test_a_refusal_is_a_config_error():
    session, _ = make_session()
    with pytest.raises(ConfigError, match="refuses this engine: rank 3 is taken"):
        session.handle(Refused("rank 3 is taken"), 0.0)


def test_a_submission_before_the_welcome_is_ignored():
    session, engine = make_session()
    assert session.handle(submit(), 0.0) == []
    assert not engine.has_work


# Sessions that end


def test_rejoin_drops_all_work_and_says_hello_again():
    session, engine = joined()
    session.handle(submit(), 0.0)
    step(session, engine)
    [hello] = session.handle(Rejoin(9), 1.0)
    assert isinstance(hello, Hello)
    assert (hello.uid, hello.incarnation) == (7, 1)
    assert step(session, engine) == []
    assert engine.block_pool.num_held == 0
    assert not engine.has_work


def test_a_burst_of_rejoins_begins_one_session():
    session, _ = joined()
    assert len(session.handle(Rejoin(9), 1.0)) == 1
    assert session.handle(Rejoin(9), 1.0) == []
    assert session.incarnation == 1


def test_after_a_silence_the_engine_drops_its_work_and_goes_on_saying_hello():
    session, engine = joined()
    session.handle(submit(), 0.0)
    assert kinds(session.tick(SILENCE_S - 1)) == [Heartbeat]
    [hello] = session.tick(SILENCE_S + 1)
    assert isinstance(hello, Hello)
    assert hello.incarnation == 1
    assert not engine.has_unfinished_requests
    [again] = session.tick(SILENCE_S + 2)
    assert isinstance(again, Hello)
    assert again.incarnation == 1


def test_a_coordinator_that_shows_itself_is_not_silent():
    session, _ = joined()
    for now in range(1, 60):
        session.handle(Heartbeat(1), float(now))
        assert kinds(session.tick(now + 0.5)) == [Heartbeat]


def test_a_lost_connection_ends_the_session_once():
    session, engine = joined()
    session.handle(submit(), 1.0)
    [hello] = session.lost_connection(2.0)
    assert isinstance(hello, Hello)
    assert hello.incarnation == 1
    assert not engine.has_unfinished_requests
    assert session.lost_connection(2.1) == []


# Leaving


def test_an_engine_that_leaves_says_so_finishes_and_may_go():
    session, engine = joined()
    session.handle(submit(), 1.0)
    assert not session.may_go(2.0)
    assert session.leave(2.0, 30.0) == [Drain(0, None, 30.0)]
    session.handle(Drain(0, None, 30.0), 2.1)
    while engine.has_unfinished_requests:
        assert not session.may_go(3.0)
        step(session, engine)
    assert session.may_go(3.0)


def test_an_engine_that_leaves_goes_when_its_time_is_up():
    session, _ = joined()
    session.handle(submit(), 1.0)
    session.handle(Drain(0, None, 5.0), 2.0)
    assert not session.may_go(6.9)
    assert session.may_go(7.0)


def test_the_shorter_of_two_times_to_leave_counts():
    session, _ = joined()
    session.handle(submit(), 1.0)
    session.leave(2.0, 30.0)
    session.handle(Drain(0, None, 1.0), 2.0)
    session.handle(Drain(0, None, 60.0), 2.5)
    assert session.may_go(3.0)


def test_an_engine_that_nobody_answers_may_leave_at_once():
    session, _ = make_session()
    assert session.leave(1.0, 30.0) == []
    assert session.may_go(1.0)


def test_an_engine_that_rejoins_while_it_leaves_says_so_again():
    session, _ = joined()
    session.leave(2.0, 30.0)
    session.handle(Rejoin(9), 3.0)
    assert session.handle(welcome(), 4.0)[-1] == Drain(0, None, 28.0)
