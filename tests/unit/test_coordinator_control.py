"""Commands to the whole fleet: acknowledged by every live rank, answered once."""

from __future__ import annotations

from typing import Any

import pytest

from homing.wire import (
    Command,
    Control,
    ControlDone,
    FleetState,
    Goodbye,
    Message,
    Welcome,
    pack_payload,
    read_payload,
)
from homing.wire import Fleet as FleetMessage
from tests.support.coordinator_fleet import Fleet, engine_hello, joined_fleet, kinds, submit, to

PAUSE, UNPAUSE, RESET = Command.PAUSE, Command.UNPAUSE, Command.RESET_PREFIX_CACHE


@pytest.fixture
def fleet() -> Fleet:
    """Two clients, two engines."""
    return joined_fleet(clients=2)


def done(
    command: Command, sequence: int, *, ok: bool = True, detail: str = "", **results: Any
) -> ControlDone:
    return ControlDone(command, sequence, ok, detail, pack_payload(results))


def answers(sends: list[tuple[bytes, Message]]) -> list[tuple[bytes, int, bool, dict]]:
    """(client, its sequence, ok, results) of each answer to a client."""
    return [
        (peer, m.sequence, m.ok, read_payload(m.results or b"", dict))
        for peer, m in sends
        if isinstance(m, ControlDone)
    ]


def test_a_command_goes_to_every_rank_and_is_answered_when_all_have(fleet: Fleet) -> None:
    sent = fleet.say(b"c1", Control(PAUSE, 7))
    assert to(b"e0", sent) == to(b"e1", sent) == [Control(PAUSE, 1)]
    assert answers(sent) == []
    assert answers(fleet.say(b"e1", done(PAUSE, 1, running=3))) == []
    sent = fleet.say(b"e0", done(PAUSE, 1))
    assert answers(sent) == [(b"c1", 7, True, {0: {}, 1: {"running": 3}})]
    assert fleet.stats()["state"] == "paused"


def test_clients_are_told_of_the_fleets_new_state(fleet: Fleet) -> None:
    told = [m for m in to(b"c2", fleet.say(b"c1", Control(PAUSE, 1))) if m]
    assert isinstance(told[0], FleetMessage)
    assert told[0].state is FleetState.PAUSED


def test_the_arguments_reach_the_engines(fleet: Fleet) -> None:
    arguments = pack_payload({"mode": "keep"})
    sent = fleet.say(b"c1", Control(PAUSE, 1, arguments))
    assert to(b"e0", sent) == [Control(PAUSE, 1, arguments)]


def test_submissions_to_a_paused_fleet_are_dispatched_for_the_engines_to_queue(
    fleet: Fleet,
) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    assert kinds(fleet.say(b"c1", submit())) == [(b"e0", "Submit")]


def test_a_repeated_answer_counts_once(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", done(PAUSE, 1))
    assert answers(fleet.say(b"e0", done(PAUSE, 1))) == []
    assert len(answers(fleet.say(b"e1", done(PAUSE, 1)))) == 1
    assert fleet.say(b"e1", done(PAUSE, 1)) == []


def test_pausing_a_paused_fleet_is_harmless_and_answered(fleet: Fleet) -> None:
    for sequence in (1, 2):
        fleet.say(b"c1", Control(PAUSE, sequence))
        fleet.say(b"e0", done(PAUSE, sequence))
        assert len(answers(fleet.say(b"e1", done(PAUSE, sequence)))) == 1
    assert fleet.stats()["state"] == "paused"


def test_unpausing_a_running_fleet_is_harmless_and_answered(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(UNPAUSE, 1))
    fleet.say(b"e0", done(UNPAUSE, 1))
    assert len(answers(fleet.say(b"e1", done(UNPAUSE, 1)))) == 1


def test_the_same_command_of_the_same_client_again_is_answered_once(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    assert fleet.say(b"c1", Control(PAUSE, 1)) == []
    fleet.say(b"e0", done(PAUSE, 1))
    assert len(answers(fleet.say(b"e1", done(PAUSE, 1)))) == 1


def test_two_controllers_are_served_one_after_the_other(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    assert fleet.say(b"c2", Control(UNPAUSE, 1)) == []
    fleet.say(b"e0", done(PAUSE, 1))
    sent = fleet.say(b"e1", done(PAUSE, 1))
    assert answers(sent) == [(b"c1", 1, True, {0: {}, 1: {}})]
    assert to(b"e0", sent) == [Control(UNPAUSE, 2)]
    fleet.say(b"e0", done(UNPAUSE, 2))
    assert answers(fleet.say(b"e1", done(UNPAUSE, 2))) == [(b"c2", 1, True, {0: {}, 1: {}})]
    assert fleet.stats()["state"] == "running"


def test_too_many_waiting_commands_are_answered_as_failed(fleet: Fleet) -> None:
    for sequence in range(65):
        assert answers(fleet.say(b"c1", Control(PAUSE, sequence))) == []
    [(_, sequence, ok, _)] = answers(fleet.say(b"c1", Control(PAUSE, 99)))
    assert (sequence, ok) == (99, False)


def test_a_rank_that_dies_counts_as_having_answered(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", done(PAUSE, 1))
    sent = fleet.fail(b"e1")
    assert answers(sent) == [(b"c1", 1, True, {0: {}, 1: {"lost": True}})]


def test_a_rank_that_leaves_counts_as_having_answered(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", Goodbye())
    assert len(answers(fleet.say(b"e1", done(PAUSE, 1)))) == 1


def test_a_command_without_any_rank_is_answered_at_once_and_holds_for_the_next(
    fleet: Fleet,
) -> None:
    fleet.fail(b"e0")
    fleet.fail(b"e1")
    assert answers(fleet.say(b"c1", Control(PAUSE, 1))) == [(b"c1", 1, True, {})]
    sent = fleet.say(b"e3", engine_hello(103))
    assert kinds(sent)[:2] == [(b"e3", "Welcome"), (b"e3", "Control")]


def test_a_rank_that_cannot_makes_the_command_fail_by_name(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", done(PAUSE, 1))
    sent = fleet.say(b"e1", done(PAUSE, 1, ok=False, detail="no"))
    [answer] = [m for m in to(b"c1", sent) if isinstance(m, ControlDone)]
    assert (answer.ok, answer.detail) == (False, "rank 1: no")


def test_unreadable_results_make_the_command_fail_not_hang(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(RESET, 1))
    fleet.say(b"e0", done(RESET, 1))
    sent = fleet.say(b"e1", ControlDone(RESET, 1, True, results=b"\xff"))
    assert [(c, s, ok) for c, s, ok, _ in answers(sent)] == [(b"c1", 1, False)]


def test_a_client_that_left_does_not_hold_up_the_next(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"c1", Control(UNPAUSE, 2))
    fleet.say(b"c2", Control(RESET, 1))
    fleet.say(b"c1", Goodbye())
    fleet.say(b"e0", done(PAUSE, 1))
    sent = fleet.say(b"e1", done(PAUSE, 1))
    assert to(b"e0", sent) == [Control(RESET, 2)], "the leaver's second was never begun"


def test_reset_prefix_cache_empties_the_index_too(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert fleet.coordinator.index.num_entries == 2
    fleet.say(b"c1", Control(RESET, 1))
    assert fleet.coordinator.index.num_entries == 0
    assert fleet.stats()["state"] == "running"


# Newcomers


def test_a_newcomer_to_a_paused_fleet_gets_no_work_before_it_has_paused(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", done(PAUSE, 1))
    fleet.say(b"e1", done(PAUSE, 1))
    sent = to(b"e2", fleet.say(b"e2", engine_hello(102, 2)))
    assert isinstance(sent[0], Welcome)
    assert sent[0].state is FleetState.PAUSED
    assert sent[1:] == [Control(PAUSE, 2)]
    for number in range(6):
        fleet.say(b"c1", submit(request_id=number, hashed=False))
    assert fleet.loads == {0: 3, 1: 3}
    [told] = to(b"c1", fleet.say(b"e2", done(PAUSE, 2)))
    assert isinstance(told, FleetMessage)
    assert told.live_ranks == 3
    fleet.say(b"c1", submit(request_id=9, hashed=False))
    assert fleet.loads == {0: 3, 1: 3, 2: 1}


def test_a_newcomer_amid_a_command_neither_delays_nor_misses_it(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    sent = fleet.say(b"e2", engine_hello(102, 2))
    assert to(b"e2", sent)[1:] == [Control(PAUSE, 2)]
    fleet.say(b"e0", done(PAUSE, 1))
    assert len(answers(fleet.say(b"e1", done(PAUSE, 1)))) == 1
    assert 2 not in fleet.loads


def test_a_newcomer_that_is_paused_already_is_in_step(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    hello = engine_hello(102, 2, state=FleetState.PAUSED)
    assert kinds(fleet.say(b"e2", hello))[0] == (b"e2", "Welcome")
    assert fleet.loads[2] == 0


def test_a_paused_newcomer_to_a_running_fleet_is_told_to_run(fleet: Fleet) -> None:
    sent = fleet.say(b"e2", engine_hello(102, 2, state=FleetState.PAUSED))
    assert to(b"e2", sent)[1:] == [Control(UNPAUSE, 1)]
    fleet.say(b"e2", done(UNPAUSE, 1))
    assert fleet.loads[2] == 0


def test_a_newcomer_that_is_told_again_before_it_has_answered_must_answer_both(
    fleet: Fleet,
) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e2", engine_hello(102, 2))
    fleet.say(b"e0", done(PAUSE, 1))
    fleet.say(b"e1", done(PAUSE, 1))
    sent = fleet.say(b"c1", Control(UNPAUSE, 2))
    assert to(b"e2", sent) == [Control(UNPAUSE, 3)]
    fleet.say(b"e2", done(PAUSE, 2))
    assert 2 not in fleet.loads
    fleet.say(b"e2", done(UNPAUSE, 3))
    assert 2 in fleet.loads


def test_a_newcomer_that_cannot_reach_the_fleets_state_is_refused(fleet: Fleet) -> None:
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e2", engine_hello(102, 2))
    sent = fleet.say(b"e2", done(PAUSE, 2, ok=False, detail="stuck"))
    assert kinds(sent)[0] == (b"e2", "Refused")
    assert 2 not in fleet.loads


def test_a_rank_that_missed_a_reset_must_catch_up_before_it_gets_work(fleet: Fleet) -> None:
    """It was thought dead, and kept a cache that the others dropped."""
    fleet.fail(b"e1")
    fleet.say(b"c1", Control(RESET, 1))
    fleet.say(b"e0", done(RESET, 1))
    sent = fleet.say(b"e1", engine_hello(101, 1, incarnation=1, control_sequence=0))
    assert to(b"e1", sent)[1:] == [Control(RESET, 2)]
    assert 1 not in fleet.loads
    fleet.say(b"e1", done(RESET, 2))
    assert 1 in fleet.loads


# A restarted coordinator


def test_a_restarted_coordinator_takes_over_the_fleets_state_from_its_engines() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    hello = engine_hello(100, 0, incarnation=1, state=FleetState.PAUSED, control_sequence=5)
    assert to(b"e0", fleet.say(b"e0", hello))[1:] == []
    assert fleet.stats()["state"] == "paused"
    sent = to(b"e1", fleet.say(b"e1", engine_hello(101, 1)))
    assert sent[1:] == [Control(PAUSE, 6)]


def test_the_engine_that_followed_the_latest_command_is_believed() -> None:
    """The coordinator died when it had told only one of them to pause."""
    fleet = Fleet()
    fleet.say(b"e0", engine_hello(100, 0, incarnation=1, control_sequence=4))
    sent = fleet.say(
        b"e1",
        engine_hello(101, 1, incarnation=1, state=FleetState.PAUSED, control_sequence=5),
    )
    assert to(b"e0", sent) == [Control(PAUSE, 6)]
    assert fleet.stats()["state"] == "paused"


def test_a_command_that_this_coordinator_gave_outweighs_what_engines_remember() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.say(b"c1", Control(PAUSE, 1))
    sent = fleet.say(b"e0", engine_hello(100, 0, incarnation=1, control_sequence=9))
    assert to(b"e0", sent)[1:] == [Control(PAUSE, 10)]


# Engines that do not play along


def test_an_engine_that_never_answers_a_command_is_taken_for_dead(fleet: Fleet) -> None:
    """It shows that it is alive: without a limit it would hold up every later command."""
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", done(PAUSE, 1))
    sent = []
    for _ in range(61):
        fleet.beat(b"e0", b"e1", b"c1", b"c2")
        sent += fleet.tick()
    assert answers(sent) == [(b"c1", 1, True, {0: {}, 1: {"lost": True}})]
    assert fleet.loads == {0: 0}


def test_an_absurd_control_sequence_is_refused(fleet: Fleet) -> None:
    """Counting on from it would leave the wire's range, and no engine could be told anything."""
    sent = fleet.say(b"e2", engine_hello(102, 2, control_sequence=2**63 - 1))
    assert kinds(sent) == [(b"e2", "Refused")]
    fleet.say(b"c1", Control(PAUSE, 1))
    fleet.say(b"e0", done(PAUSE, 1))
    assert len(answers(fleet.say(b"e1", done(PAUSE, 1)))) == 1


def test_results_that_can_be_read_but_hardly_packed_reach_the_client(fleet: Fleet) -> None:
    nested: Any = {}
    for _ in range(300):
        nested = {"deeper": nested}
    fleet.say(b"c1", Control(RESET, 1))
    fleet.say(b"e0", done(RESET, 1))
    sent = fleet.say(b"e1", done(RESET, 1, **nested))
    [(_, _, ok, results)] = answers(sent)
    assert (ok, results[1]) == (True, nested)
