"""What an engine's session does on command, and what its heartbeats tell."""

from __future__ import annotations

from msgspec.structs import replace

from homing.engine.kv_journal import KvJournal
from homing.wire import (
    Command,
    Control,
    ControlDone,
    FleetState,
    Heartbeat,
    Hello,
    KvEvents,
    Rejoin,
    pack,
    read_payload,
)
from tests.support.engine_session import ALICE, deltas, joined, kinds, step, submit, welcome


def test_pause_and_unpause_are_carried_out_and_answered():
    session, engine = joined()
    session.handle(submit(), 0.0)
    [paused] = session.handle(Control(Command.PAUSE, 4), 0.0)
    assert isinstance(paused, ControlDone)
    assert (paused.command, paused.sequence, paused.ok) == (Command.PAUSE, 4, True)
    assert step(session, engine) == []
    [again] = session.handle(Control(Command.PAUSE, 5), 0.0)
    assert isinstance(again, ControlDone)
    assert again.ok
    session.handle(Control(Command.UNPAUSE, 6), 0.0)
    assert len(deltas(step(session, engine))) == 1


def test_a_hello_tells_the_state_and_the_last_command():
    session, _ = joined()
    session.handle(Control(Command.PAUSE, 4), 0.0)
    [hello] = session.handle(Rejoin(9), 1.0)
    assert isinstance(hello, Hello)
    assert (hello.state, hello.control_sequence) == (FleetState.PAUSED, 4)


def test_a_reset_prefix_cache_tells_how_much_was_dropped():
    session, engine = joined()
    session.handle(submit(prompt=list(range(3, 20))), 0.0)
    step(session, engine)
    [done] = session.handle(Control(Command.RESET_PREFIX_CACHE, 1), 0.0)
    assert isinstance(done, ControlDone)
    assert read_payload(done.results or b"", dict[str, int]) == {
        "dropped_blocks": 4,
        "unfinished_requests": 1,
    }


def test_a_heartbeat_shows_the_engine():
    session, engine = joined(max_batch_requests=1)
    session.handle(submit(ALICE, 1), 0.0)
    session.handle(submit(ALICE, 2, prompt=[3, 4, 5]), 0.0)
    step(session, engine)
    [beat] = session.tick(0.5)
    assert isinstance(beat, Heartbeat)
    assert (beat.running, beat.waiting, beat.owed_tokens) == (1, 1, 4)
    assert (beat.kv_used_blocks, beat.kv_total_blocks) == (2, 63)
    counters = read_payload(beat.counters or b"", dict[str, float])
    assert counters["requests_started"] == 2
    assert counters["prefilled_tokens"] == 5
    pack(beat)


def test_what_the_cache_holds_is_told_after_a_heartbeat_to_a_fleet_that_reads_prefixes():
    session, engine = joined()
    engine.block_pool.journal = KvJournal(engine.limits.block_size)
    session.handle(submit(prompt=list(range(3, 20))), 0.0)
    step(session, engine)
    assert kinds(session.tick(0.5)) == [Heartbeat], "this fleet's policy reads none"
    session.handle(replace(welcome(), reads_prefixes=True), 0.6)
    beat, events = session.tick(1.1)
    assert isinstance(beat, Heartbeat)
    assert isinstance(events, KvEvents)
    assert (events.num_stored, events.num_dropped) == (1, 0)
    pack(events)
    assert kinds(session.tick(1.6)) == [Heartbeat]


def test_a_new_session_tells_nothing_of_the_one_before():
    session, engine = joined()
    engine.block_pool.journal = KvJournal(engine.limits.block_size)
    session.handle(submit(prompt=list(range(3, 20))), 0.0)
    step(session, engine)
    session.handle(Rejoin(9), 0.4)
    session.handle(replace(welcome(), reads_prefixes=True), 0.5)
    assert kinds(session.tick(1.0)) == [Heartbeat]
