"""The weights of a fleet: all ranks take new ones or none does, and old ones get no more work."""

from __future__ import annotations

import pytest

from homing.wire import Control, InFlightKV, SetEpoch, pack_payload
from homing.wire import Fleet as FleetMessage
from tests.support.coordinator_commands import (
    APPLY,
    BOTH,
    COMMIT,
    PAUSE,
    ROLLBACK,
    SET_EPOCH,
    UPDATE,
    Driver,
    answers,
    commands,
    directory,
    phases,
    update_of,
)
from tests.support.coordinator_fleet import Fleet, engine_hello, joined_fleet, submit, to


@pytest.fixture
def driver() -> Driver:
    """Of two engines; two clients ask."""
    return Driver(joined_fleet(clients=2))


def test_an_update_is_prepared_by_all_then_committed_by_all(driver: Driver) -> None:
    sent = driver.ask(UPDATE, directory(in_flight=InFlightKV.RECOMPUTE))
    expected = directory(in_flight=InFlightKV.RECOMPUTE, epoch=1, base_epoch=0)
    assert [update_of(m) for m in to(b"e0", sent)] == [expected]
    assert driver.answer(b"e0") == []
    assert driver.fleet.stats()["epoch"] == 0
    sent = driver.answer(b"e1")
    assert phases(b"e0", sent) == phases(b"e1", sent) == [COMMIT]
    [told] = [m for m in to(b"c2", sent) if isinstance(m, FleetMessage)]
    assert told.epoch == 1
    assert answers(sent) == []
    driver.answer(b"e0")
    [(client, ok, _)] = answers(driver.answer(b"e1"))
    assert (client, ok) == (b"c1", True)
    assert driver.fleet.stats()["epoch"] == 1


def test_an_update_that_one_rank_cannot_prepare_is_taken_back_everywhere(driver: Driver) -> None:
    driver.ask(UPDATE, directory())
    driver.answer(b"e0")
    sent = driver.answer(b"e1", ok=False, detail="no such directory")
    assert phases(b"e0", sent) == [ROLLBACK]
    assert phases(b"e1", sent) == []
    assert answers(sent) == []
    [(_, ok, detail)] = answers(driver.answer(b"e0"))
    assert (ok, detail) == (False, "rank 1: no such directory")
    assert driver.fleet.stats()["epoch"] == 0
    assert set(driver.fleet.loads) == {0, 1}


def test_a_rank_that_dies_while_it_prepares_does_not_hold_up_the_others(driver: Driver) -> None:
    driver.ask(UPDATE, directory())
    driver.answer(b"e0")
    sent = driver.see(driver.fleet.fail(b"e1"))
    assert phases(b"e0", sent) == [COMMIT]
    assert [ok for _, ok, _ in answers(driver.answer(b"e0"))] == [True]


def test_a_rank_that_dies_between_the_phases_comes_back_to_the_new_weights(driver: Driver) -> None:
    driver.ask(UPDATE, directory())
    driver.answer(b"e0")
    driver.answer(b"e1")
    driver.answer(b"e0")
    sent = driver.see(driver.fleet.fail(b"e1"))
    assert [ok for _, ok, _ in answers(sent)] == [True]
    driver.told[b"e1"] = []
    sent = driver.see(driver.fleet.say(b"e1", engine_hello(201, 1)))
    [told] = [update_of(m) for m in to(b"e1", sent) if isinstance(m, Control)]
    assert (told.phase, told.path, told.epoch) == (APPLY, "/new", 1)
    assert 1 not in driver.fleet.loads
    driver.answer(b"e1")
    assert 1 in driver.fleet.loads


def test_an_update_without_any_rank_fails(driver: Driver) -> None:
    driver.fleet.fail(b"e0")
    driver.fleet.fail(b"e1")
    [(_, ok, detail)] = answers(driver.ask(UPDATE, directory()))
    assert (ok, detail) == (False, "no rank could take the weights")
    assert driver.fleet.stats()["epoch"] == 0


@pytest.mark.parametrize("epoch", [0, 3, 2**60])
def test_epochs_only_increase_and_stay_on_the_wire(driver: Driver, epoch: int) -> None:
    driver.ask(SET_EPOCH, SetEpoch(epoch=3))
    driver.all_answer(*BOTH)
    [(_, ok, detail)] = answers(driver.ask(UPDATE, directory(epoch=epoch)))
    assert not ok
    assert "only increase" in detail
    assert commands(b"e0", driver.fleet.say(b"c1", Control(PAUSE, 9))) == [PAUSE], "it goes on"


def test_an_epoch_may_be_chosen_and_set_without_weights(driver: Driver) -> None:
    driver.ask(UPDATE, directory(epoch=7))
    driver.all_answer(*BOTH)
    driver.ask(SET_EPOCH, SetEpoch(epoch=9))
    driver.all_answer(*BOTH)
    driver.ask(SET_EPOCH, SetEpoch(epoch=9))
    assert [ok for _, ok, _ in answers(driver.all_answer(*BOTH))] == [True], "a repeat"
    assert driver.fleet.stats()["epoch"] == 9
    sent = driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    assert commands(b"e2", sent) == [UPDATE, SET_EPOCH]
    driver.all_answer(b"e2")
    assert 2 in driver.fleet.loads


@pytest.mark.parametrize("arguments", [b"\xc1", b"\x80", b"\x81\xa6source\xa3ftp", b"\x90"])
def test_arguments_that_are_none_are_refused(driver: Driver, arguments: bytes) -> None:
    [(_, ok, detail)] = answers(driver.fleet.say(b"c1", Control(UPDATE, 1, arguments)))
    assert not ok
    assert "arguments" in detail


def test_the_index_forgets_the_old_epochs_hashes(driver: Driver) -> None:
    driver.fleet.say(b"c1", submit())
    driver.ask(UPDATE, directory())
    assert driver.fleet.coordinator.index.num_entries == 2
    driver.answer(b"e0")
    driver.answer(b"e1")
    assert driver.fleet.coordinator.index.num_entries == 0


def test_a_rank_that_cannot_take_what_it_prepared_gets_no_more_work(driver: Driver) -> None:
    driver.ask(UPDATE, directory())
    driver.answer(b"e0")
    driver.answer(b"e1")
    driver.answer(b"e0", ok=False, detail="broken")
    assert set(driver.fleet.loads) == {1}


def test_a_restarted_coordinator_learns_the_epoch_and_where_the_weights_are() -> None:
    """It died when it had told only one of two ranks to commit."""
    fleet = Fleet()
    driver = Driver(fleet)
    fleet.say(b"e0", engine_hello(100, 0, incarnation=1, control_sequence=4))
    assert set(fleet.loads) == {0}
    weights = pack_payload(directory("/new", epoch=1))
    hello = engine_hello(101, 1, incarnation=1, control_sequence=5, epoch=1, weights=weights)
    driver.see(fleet.say(b"e1", hello))
    assert set(fleet.loads) == {1}, "the other's weights are older"
    assert fleet.stats()["epoch"] == 1
    driver.told.pop(b"e0", None)
    driver.see(fleet.say(b"e0", engine_hello(100, 0, incarnation=2, control_sequence=4)))
    assert [update_of(control).path for control in driver.told[b"e0"]] == ["/new"]
    driver.answer(b"e0")
    assert set(fleet.loads) == {0, 1}
