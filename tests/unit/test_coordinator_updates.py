"""The fleet's states and weights: all ranks take new ones or none does, and no rank is given work
with old ones."""

from __future__ import annotations

from typing import Any

import pytest

from homing.wire import (
    Command,
    Control,
    ControlDone,
    FleetState,
    InFlightKV,
    KVMode,
    Message,
    Pause,
    PauseMode,
    SetEpoch,
    Suspend,
    UpdatePhase,
    UpdateWeights,
    WeightGroup,
    WeightsMode,
    WeightSource,
    pack_payload,
    read_payload,
)
from homing.wire import (
    Fleet as FleetMessage,
)
from tests.support.coordinator_fleet import Fleet, engine_hello, kinds, submit, to

PAUSE, UNPAUSE, SUSPEND, RESUME = Command.PAUSE, Command.UNPAUSE, Command.SUSPEND, Command.RESUME
UPDATE, SET_EPOCH = Command.UPDATE_WEIGHTS, Command.SET_EPOCH
PREPARE, COMMIT = UpdatePhase.PREPARE, UpdatePhase.COMMIT
ROLLBACK, APPLY = UpdatePhase.ROLLBACK, UpdatePhase.APPLY


@pytest.fixture
def fleet() -> Fleet:
    """Two clients, two engines."""
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.join_engine(1)
    fleet.join_client(1)
    fleet.join_client(2)
    return fleet


def directory(path: str = "/new", **fields: Any) -> UpdateWeights:
    return UpdateWeights(source=WeightSource.DIRECTORY, path=path, **fields)


def update_of(message: Message) -> UpdateWeights:
    assert isinstance(message, Control)
    assert message.command is UPDATE
    return read_payload(message.arguments or b"", UpdateWeights)


def phases(peer: bytes, sent: list[tuple[bytes, Message]]) -> list[UpdatePhase]:
    return [update_of(m).phase for m in to(peer, sent) if isinstance(m, Control)]


def commands(peer: bytes, sent: list[tuple[bytes, Message]]) -> list[Command]:
    return [m.command for m in to(peer, sent) if isinstance(m, Control)]


def answers(sent: list[tuple[bytes, Message]]) -> list[tuple[bytes, bool, str]]:
    return [(peer, m.ok, m.detail) for peer, m in sent if isinstance(m, ControlDone)]


class Driver:
    """Engines that answer the last thing they were told, when the test says so."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.told: dict[bytes, list[Control]] = {}
        self.sequence = 0

    def see(self, sent: list[tuple[bytes, Message]]) -> list[tuple[bytes, Message]]:
        for peer, message in sent:
            if isinstance(message, Control):
                self.told.setdefault(peer, []).append(message)
        return sent

    def ask(
        self, command: Command, arguments: Any = None, client: bytes = b"c1"
    ) -> list[tuple[bytes, Message]]:
        self.sequence += 1
        frame = None if arguments is None else pack_payload(arguments)
        return self.see(self.fleet.say(client, Control(command, self.sequence, frame)))

    def answer(
        self, engine: bytes, *, ok: bool = True, detail: str = ""
    ) -> list[tuple[bytes, Message]]:
        """To the oldest command that it has not answered."""
        control = self.told[engine].pop(0)
        results = pack_payload({} if ok else {"error": detail})
        done = ControlDone(control.command, control.sequence, ok, detail, results)
        return self.see(self.fleet.say(engine, done))

    def all_answer(self, *engines: bytes) -> list[tuple[bytes, Message]]:
        """Until nothing is unanswered; what the coordinator said to all of it."""
        said: list[tuple[bytes, Message]] = []
        while any(self.told.get(engine) for engine in engines):
            for engine in engines:
                if self.told.get(engine):
                    said += self.answer(engine)
        return said


@pytest.fixture
def driver(fleet: Fleet) -> Driver:
    return Driver(fleet)


BOTH = (b"e0", b"e1")


# States


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


# Updates


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
def test_arguments_that_are_none_are_refused(fleet: Fleet, arguments: bytes) -> None:
    [(_, ok, detail)] = answers(fleet.say(b"c1", Control(UPDATE, 1, arguments)))
    assert not ok
    assert "arguments" in detail


def test_the_index_forgets_the_old_epochs_hashes(driver: Driver) -> None:
    driver.fleet.say(b"c1", submit())
    driver.ask(UPDATE, directory())
    assert driver.fleet.coordinator.index.num_entries == 2
    driver.answer(b"e0")
    driver.answer(b"e1")
    assert driver.fleet.coordinator.index.num_entries == 0


# Newcomers and weights


def updated(driver: Driver, *updates: UpdateWeights) -> None:
    for update in updates:
        driver.ask(UPDATE, update)
        driver.all_answer(*BOTH)


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
