"""What the coordinator counts, and the snapshot that it answers with."""

from __future__ import annotations

from homing.wire import (
    FinishedRequest,
    FinishReason,
    FleetState,
    Goodbye,
    Heartbeat,
    Output,
    Stats,
    StatsReply,
    pack_payload,
    read_payload,
)
from tests.support.coordinator_fleet import Fleet, engine_hello, only, submit


def test_stats_are_answered_with_the_token_and_the_snapshot() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.say(b"c1", submit())
    fleet.say(b"e0", Heartbeat(0, running=1, kv_used_blocks=3, kv_total_blocks=8))
    reply = only(fleet.say(b"c1", Stats(42)))
    assert isinstance(reply, StatsReply)
    assert reply.token == 42
    snapshot = read_payload(reply.snapshot or b"", dict)
    [row] = snapshot["ranks"]
    assert row == {
        "rank": 0,
        "live": True,
        "state": "running",
        "load": 1,
        "dispatched": 1,
        "running": 1,
        "waiting": 0,
        "owed_tokens": 0,
        "kv_used_blocks": 3,
        "kv_total_blocks": 8,
        "counters": {},
        "circuit": "closed",
        "leaving": False,
    }
    assert snapshot["requests"] == 1
    assert snapshot["index_entries"] == 2
    assert snapshot["state"] == FleetState.RUNNING.value


def counters(**values: float) -> Heartbeat:
    return Heartbeat(0, counters=pack_payload(values))


def test_engine_counters_add_up_over_the_dead_and_the_living() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.join_engine(1)
    fleet.say(b"e0", counters(steps=10, tokens=5))
    fleet.say(b"e1", counters(steps=1))
    fleet.fail(b"e0")
    assert fleet.stats()["totals"] == {"steps": 11, "tokens": 5}
    fleet.join_engine(5, rank=0)
    assert fleet.stats()["totals"] == {"steps": 11, "tokens": 5}
    fleet.say(b"e5", counters(steps=2))
    assert fleet.stats()["totals"] == {"steps": 13, "tokens": 5}


def test_what_clients_count_is_added_up_too() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.join_client(7)
    fleet.join_client(8)
    fleet.say(b"e0", counters(steps=1))
    fleet.say(b"c7", counters(answers=2))
    fleet.say(b"c8", counters(answers=3))
    fleet.say(b"c7", Goodbye())
    assert fleet.stats()["totals"] == {"steps": 1, "answers": 5}


def test_a_process_that_rejoins_is_not_counted_twice() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.say(b"e0", counters(steps=10))
    fleet.say(b"e0", engine_hello(100, 0, incarnation=1))
    assert fleet.stats()["totals"] == {"steps": 10}
    fleet.say(b"e0", counters(steps=12))
    assert fleet.stats()["totals"] == {"steps": 12}


def test_totals_never_fall_over_any_number_of_deaths() -> None:
    fleet = Fleet()
    for life in range(3000):
        fleet.say(b"e%d" % life, engine_hello(10_000 + life, rank=0))
        fleet.say(b"e%d" % life, counters(steps=2))
        assert fleet.stats()["totals"] == {"steps": 2 * (life + 1)}


def test_odd_counters_do_no_harm() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.say(b"e0", counters(steps=5, nan=float("nan"), inf=float("inf"), negative=-1))
    fleet.say(b"e0", counters(steps=3))
    fleet.say(b"e0", Heartbeat(0, counters=b"\xff"))
    fleet.say(b"e0", Heartbeat(0, counters=pack_payload({f"{i}": i for i in range(10_000)})))
    totals = fleet.stats()["totals"]
    assert totals["steps"] == 5
    assert len(totals) <= 256
    assert not totals.keys() & {"nan", "inf", "negative"}
    assert fleet.stats()["garbage"] == 1


def test_a_gone_rank_keeps_its_row_without_its_load() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.say(b"c1", submit())
    fleet.say(b"e0", Heartbeat(0, running=1))
    fleet.fail(b"e0")
    [row] = fleet.stats()["ranks"]
    assert (row["live"], row["load"], row["running"], row["dispatched"]) == (False, 0, 0, 1)


def test_absurd_numbers_from_engines_do_not_keep_the_snapshot_from_being_packed() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    engine = b""
    for number in range(600):
        engine = fleet.join_engine(number, rank=0)
        fleet.say(engine, counters(steps=2**53, more=2**63))
    for request_id, tokens in enumerate((2**64 - 1, -(2**63))):
        fleet.say(b"c1", submit(request_id=request_id))
        end = FinishedRequest(request_id, 0, FinishReason.LENGTH, tokens, tokens)
        fleet.say(engine, Output(1, 1, 1, pack_payload([end]), b"\x90"))
    assert isinstance(only(fleet.say(b"c1", Stats(1))), StatsReply)
    assert fleet.stats()["totals"] == {"steps": 600 * 2**53}
