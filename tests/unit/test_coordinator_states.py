"""The fleet's states: paused, suspended and running, and who joins it in between."""

from __future__ import annotations

import pytest

from homing.wire import (
    Command,
    FleetState,
    KVMode,
    Pause,
    PauseMode,
    Suspend,
    WeightsMode,
    read_payload,
)
from tests.support.coordinator_commands import (
    BOTH,
    PAUSE,
    RESUME,
    SUSPEND,
    UNPAUSE,
    Driver,
    answers,
    commands,
)
from tests.support.coordinator_fleet import engine_hello, joined_fleet, submit


@pytest.fixture
def driver() -> Driver:
    """Of two engines; two clients ask."""
    return Driver(joined_fleet(clients=2))


def test_the_states_follow_one_another(driver: Driver) -> None:
    for command, state in (
        (PAUSE, "paused"),
        (SUSPEND, "suspended"),
        (SUSPEND, "suspended"),
        (PAUSE, "suspended"),
        (RESUME, "paused"),
        (RESUME, "paused"),
        (UNPAUSE, "running"),
    ):
        driver.ask(command)
        assert [ok for _, ok, _ in answers(driver.all_answer(*BOTH))] == [True], command
        assert driver.fleet.stats()["state"] == state


@pytest.mark.parametrize(
    ("before", "command", "message"),
    [
        ((), SUSPEND, "pause it before"),
        ((), RESUME, "nothing to resume"),
        ((PAUSE, SUSPEND), UNPAUSE, "resume it before"),
    ],
)
def test_what_the_state_does_not_allow_is_refused_before_any_engine_is_told(
    driver: Driver, before: tuple[Command, ...], command: Command, message: str
) -> None:
    for step in before:
        driver.ask(step)
        driver.all_answer(*BOTH)
    state = driver.fleet.stats()["state"]
    sent = driver.ask(command)
    [(_, ok, detail)] = answers(sent)
    assert not ok
    assert message in detail
    assert commands(b"e0", sent) == []
    assert driver.fleet.stats()["state"] == state


def test_a_newcomer_to_a_suspended_fleet_pauses_and_suspends_as_the_others_did(
    driver: Driver,
) -> None:
    suspend = Suspend(kv=KVMode.DISCARD, weights=WeightsMode.OFFLOAD)
    driver.ask(PAUSE)
    driver.ask(SUSPEND, suspend)
    driver.all_answer(*BOTH)
    sent = driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    assert commands(b"e2", sent) == [PAUSE, SUSPEND]
    assert read_payload(driver.told[b"e2"][1].arguments or b"", Suspend) == suspend
    driver.answer(b"e2")
    assert 2 not in driver.fleet.loads
    driver.answer(b"e2")
    assert 2 in driver.fleet.loads


def test_an_engine_that_comes_back_suspended_to_a_running_fleet_is_woken(driver: Driver) -> None:
    hello = engine_hello(102, 2, state=FleetState.SUSPENDED)
    assert commands(b"e2", driver.see(driver.fleet.say(b"e2", hello))) == [RESUME, UNPAUSE]


def test_discarding_the_caches_empties_the_index(driver: Driver) -> None:
    driver.fleet.say(b"c1", submit())
    driver.ask(PAUSE)
    driver.all_answer(*BOTH)
    driver.ask(SUSPEND, Suspend(kv=KVMode.OFFLOAD))
    driver.all_answer(*BOTH)
    assert driver.fleet.coordinator.index.num_entries == 2
    driver.ask(SUSPEND, Suspend(kv=KVMode.DISCARD))
    assert driver.fleet.coordinator.index.num_entries == 0


def test_a_pause_that_waits_gives_way_to_what_ends_the_waiting(driver: Driver) -> None:
    driver.ask(PAUSE, Pause(mode=PauseMode.WAIT))
    driver.answer(b"e0")
    assert driver.ask(RESUME, client=b"c2") == [], "this one waits its turn"
    sent = driver.ask(UNPAUSE)
    assert [(client, ok) for client, ok, _ in answers(sent)] == [(b"c1", False)]
    assert commands(b"e0", sent) == [RESUME]
    assert [c for c, ok, _ in answers(driver.all_answer(*BOTH)) if ok] == [b"c2", b"c1"]
    assert driver.fleet.stats()["state"] == "running"


def test_a_pause_that_waits_is_not_taken_for_a_broken_engine(driver: Driver) -> None:
    driver.ask(PAUSE, Pause(mode=PauseMode.WAIT))
    for _ in range(200):
        driver.fleet.beat(b"e0", b"e1", b"c1", b"c2")
        driver.fleet.tick()
    assert set(driver.fleet.loads) == {0, 1}
    sent = driver.ask(PAUSE, Pause(mode=PauseMode.ABORT), client=b"c2")
    assert [(c, ok) for c, ok, _ in answers(sent)] == [(b"c1", False)]
    assert [c for c, ok, _ in answers(driver.all_answer(*BOTH)) if ok] == [b"c2"]
