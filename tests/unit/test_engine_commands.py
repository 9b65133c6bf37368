"""The coordinator's commands as an engine carries them out: in order, even those that take long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from homing.engine.commands import Commands
from homing.engine.engine import Engine
from homing.engine.weight_update.staging import StagedWeights
from homing.params import SamplingParams
from homing.wire import (
    Command,
    Control,
    ControlDone,
    FleetState,
    Pause,
    PauseMode,
    Suspend,
    UpdatePhase,
    UpdateWeights,
    WeightSource,
    pack_payload,
    read_payload,
)
from tests.support.fake_model import SHIFT, make_engine

UPDATE = Command.UPDATE_WEIGHTS
TWO_TOKENS = SamplingParams(temperature=0.0, num_tokens_to_generate=2, ignore_eos=True)


class Driver:
    def __init__(self) -> None:
        self.engine: Engine = make_engine()[0]
        self.commands = Commands(self.engine)
        self.sequence = 0
        self._woken = threading.Event()
        self.engine.wake = self._woken.set
        # An update is prepared when `later` is called, not sooner: tests do not race with it.
        self._may_prepare = threading.Event()
        stage = self.engine.lifecycle.stage

        def stage_later(*arguments: Any, **keywords: Any) -> StagedWeights:
            assert self._may_prepare.wait(30)
            return stage(*arguments, **keywords)

        self.engine.lifecycle.stage = stage_later

    def tell(self, command: Command, arguments: object = None) -> list[ControlDone]:
        self.sequence += 1
        frame = None if arguments is None else pack_payload(arguments)
        return self.commands.take(Control(command, self.sequence, frame))

    def later(self) -> list[ControlDone]:
        """The answers to what was prepared on the other thread."""
        self._may_prepare.set()
        assert self._woken.wait(30)
        self._woken.clear()
        self._may_prepare.clear()
        return self.commands.poll()


def update(path: Path, phase: UpdatePhase, **fields: object) -> UpdateWeights:
    values: dict[str, object] = {"epoch": 1} | fields
    return UpdateWeights(
        source=WeightSource.DIRECTORY,
        path=str(path),
        phase=phase,
        **values,  # type: ignore[arg-type]
    )


def weights(tmp_path: Path, shift: float) -> Path:
    file = tmp_path / "new.safetensors"
    save_file({SHIFT: torch.tensor([shift])}, file)
    return file


def test_an_update_is_prepared_aside_and_swapped_at_the_commit(tmp_path: Path) -> None:
    driver = Driver()
    before = driver.engine.runner.model
    path = weights(tmp_path, 2.0)
    assert driver.tell(UPDATE, update(path, UpdatePhase.PREPARE)) == []
    [prepared] = driver.later()
    assert prepared.ok
    assert read_payload(prepared.results or b"", dict)["num_parameters"] == 1
    assert driver.engine.runner.model is before
    assert driver.engine.lifecycle.epoch == 0
    [committed] = driver.tell(UPDATE, update(path, UpdatePhase.COMMIT))
    assert committed.ok
    assert driver.engine.runner.model is not before
    assert driver.engine.lifecycle.epoch == 1
    said = read_payload(driver.commands.weights_from or b"", UpdateWeights)
    assert (said.path, said.epoch) == (str(path), 1)


def test_commands_wait_for_an_update_that_is_being_prepared(tmp_path: Path) -> None:
    driver = Driver()
    path = weights(tmp_path, 2.0)
    driver.tell(UPDATE, update(path, UpdatePhase.APPLY))
    assert driver.tell(Command.PAUSE) == []
    assert driver.engine.lifecycle.state is FleetState.RUNNING
    assert [answer.command for answer in driver.later()] == [UPDATE, Command.PAUSE]
    assert driver.engine.lifecycle.epoch == 1
    assert driver.engine.lifecycle.state is FleetState.PAUSED


def test_what_was_rolled_back_cannot_be_committed(tmp_path: Path) -> None:
    driver = Driver()
    before = driver.engine.runner.model
    path = weights(tmp_path, 2.0)
    driver.tell(UPDATE, update(path, UpdatePhase.PREPARE))
    driver.later()
    [rolled_back] = driver.tell(UPDATE, update(path, UpdatePhase.ROLLBACK))
    assert rolled_back.ok
    [committed] = driver.tell(UPDATE, update(path, UpdatePhase.COMMIT))
    assert not committed.ok
    assert driver.engine.runner.model is before


def test_a_session_that_ends_takes_its_update_with_it(tmp_path: Path) -> None:
    driver = Driver()
    path = weights(tmp_path, 2.0)
    driver.tell(UPDATE, update(path, UpdatePhase.PREPARE))
    driver.commands.drop()
    assert driver.later() == []
    [committed] = driver.tell(UPDATE, update(path, UpdatePhase.COMMIT))
    assert not committed.ok


def test_a_partial_update_is_for_the_weights_that_it_names(tmp_path: Path) -> None:
    driver = Driver()
    path = weights(tmp_path, 2.0)
    wrong = update(path, UpdatePhase.PREPARE, partial=True, base_epoch=4, epoch=5)
    [refused] = driver.tell(UPDATE, wrong)
    assert not refused.ok
    assert "of epoch 0" in refused.detail


def test_a_pause_that_waits_is_answered_when_it_has_begun() -> None:
    driver = Driver()
    driver.engine.add_request("a", torch.arange(3, 9).numpy(), TWO_TOKENS)
    assert driver.tell(Command.PAUSE, Pause(mode=PauseMode.WAIT)) == []
    while driver.engine.has_work:
        assert driver.commands.poll() == []
        driver.engine.step()
    [answer] = driver.commands.poll()
    assert (answer.command, answer.ok) == (Command.PAUSE, True)


def test_what_cannot_be_done_is_answered_by_the_reason() -> None:
    driver = Driver()
    [refused] = driver.tell(Command.SUSPEND, Suspend())
    assert not refused.ok
    assert "pause it before" in refused.detail
    [garbled] = driver.tell(Command.PAUSE, {"mode": "perhaps"})
    assert not garbled.ok
    assert driver.commands.sequence == 0, "what failed was not carried out"
