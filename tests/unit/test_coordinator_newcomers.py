"""Engines that join after an update of the weights: what they load before they get work."""

from __future__ import annotations

import pytest

from homing.wire import SetEpoch, UpdateWeights, WeightGroup, WeightSource
from tests.support.coordinator_commands import (
    BOTH,
    COMMIT,
    PREPARE,
    SET_EPOCH,
    UPDATE,
    Driver,
    commands,
    directory,
    phases,
    update_of,
    updated,
)
from tests.support.coordinator_fleet import engine_hello, joined_fleet, kinds


@pytest.fixture
def driver() -> Driver:
    """Of two engines; two clients ask."""
    return Driver(joined_fleet(clients=2))


def test_a_newcomer_loads_the_last_whole_update_and_the_partial_ones_after_it(
    driver: Driver,
) -> None:
    updated(
        driver,
        directory("/a"),
        directory("/b"),
        directory("/c", partial=True),
        directory("/d", partial=True),
    )
    driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    told = [update_of(control) for control in driver.told[b"e2"]]
    assert [(u.path, u.epoch, u.base_epoch) for u in told] == [
        ("/b", 2, 0),
        ("/c", 3, 2),
        ("/d", 4, 3),
    ]
    driver.all_answer(b"e2")
    assert 2 in driver.fleet.loads


def test_an_engine_that_missed_only_a_partial_update_loads_only_that(driver: Driver) -> None:
    updated(driver, directory("/a"), directory("/b", partial=True))
    driver.see(driver.fleet.say(b"e2", engine_hello(102, 2, epoch=1)))
    assert [update_of(control).path for control in driver.told[b"e2"]] == ["/b"]


def test_a_newcomer_to_weights_from_memory_waits_for_the_next_whole_update(
    driver: Driver,
) -> None:
    shared = UpdateWeights(source=WeightSource.SHARED_MEMORY, path="/shm/1")
    updated(driver, shared)
    sent = driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    assert commands(b"e2", sent) == []
    assert 2 not in driver.fleet.loads

    driver.ask(UPDATE, directory("/part", partial=True))
    driver.answer(b"e0")
    driver.answer(b"e1")
    sent = driver.answer(b"e2", ok=False, detail="the weights here are of epoch 0")
    assert phases(b"e0", sent) == [COMMIT], "those who cannot use it do not stop the others"
    driver.all_answer(*BOTH)
    assert 2 not in driver.fleet.loads

    updated_all = driver.ask(UPDATE, directory("/whole"))
    assert phases(b"e2", updated_all) == [PREPARE]
    driver.all_answer(*BOTH, b"e2")
    assert 2 in driver.fleet.loads
    assert driver.fleet.stats()["epoch"] == 3


def test_a_newcomer_amid_the_preparation_prepares_too(driver: Driver) -> None:
    driver.ask(UPDATE, directory())
    sent = driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    assert phases(b"e2", sent) == [PREPARE]
    driver.answer(b"e0")
    assert driver.answer(b"e1") == []
    sent = driver.answer(b"e2")
    assert phases(b"e0", sent) == phases(b"e2", sent) == [COMMIT]


def test_a_newcomer_that_a_process_group_has_no_place_for_is_brought_up_afterwards(
    driver: Driver,
) -> None:
    """It joined with the epoch of the fleet, and got work; its weights are the old ones then."""
    group = WeightGroup(host="127.0.0.1", port=1, ranks=(0, 1), tensors=())
    driver.ask(UPDATE, UpdateWeights(source=WeightSource.GROUP, group=group))
    sent = driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    assert commands(b"e2", sent) == []
    assert 2 in driver.fleet.loads
    driver.answer(b"e0")
    driver.answer(b"e1")
    assert 2 not in driver.fleet.loads


def test_a_newcomer_whose_directory_is_gone_waits_without_being_refused(driver: Driver) -> None:
    updated(driver, directory("/gone"))
    driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    sent = driver.answer(b"e2", ok=False, detail="no such directory")
    assert "Refused" not in [kind for _, kind in kinds(sent)]
    assert 2 not in driver.fleet.loads
    driver.ask(UPDATE, directory("/there"))
    driver.all_answer(*BOTH, b"e2")
    assert 2 in driver.fleet.loads


def test_a_newcomer_that_loads_while_the_fleet_moves_on_is_sent_on(driver: Driver) -> None:
    updated(driver, directory("/a"))
    driver.see(driver.fleet.say(b"e2", engine_hello(102, 2)))
    driver.ask(SET_EPOCH, SetEpoch(epoch=5))
    driver.all_answer(*BOTH)
    driver.answer(b"e2")
    assert 2 not in driver.fleet.loads
    driver.all_answer(b"e2")
    assert 2 in driver.fleet.loads
