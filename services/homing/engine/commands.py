"""Carries out the coordinator's commands, one after the other, and says what came of each.

Most are done when they come. An update of the weights is prepared on another thread while requests
run on, and commands that come meanwhile wait for it; a pause may wait for requests to end, and
commands do not wait for that.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar, assert_never

from msgspec import structs

from homing.engine.engine import Engine
from homing.engine.weight_update import StagedWeights, open_source
from homing.errors import HomingError, InvalidRequest, NotAllowed, WireError
from homing.wire import (
    Command,
    Control,
    ControlDone,
    Pause,
    Payload,
    SetEpoch,
    Suspend,
    UpdatePhase,
    UpdateWeights,
    WeightSource,
    pack_payload,
    read_payload,
)
from homing.wire.messages import clip

log = logging.getLogger(__name__)

Results = dict[str, Any]


class _Staging(NamedTuple):
    """An update that is being prepared."""

    control: Control
    update: UpdateWeights
    future: Future[StagedWeights]


class Commands:
    def __init__(self, engine: Engine) -> None:
        self.sequence = 0
        """Of the last command carried out."""
        self.rank: int | None = None
        """This engine's in the fleet; set by its session."""
        self.weights_from: bytes | None = None
        """The update by which another engine would get these weights, packed."""
        self.is_stopping = False
        """The process is to end, once the answers are sent."""
        self._engine = engine
        self._lifecycle = engine.lifecycle
        self._waiting: deque[Control] = deque()
        self._staging: _Staging | None = None
        self._prepared: tuple[UpdateWeights, StagedWeights] | None = None
        self._draining: Control | None = None

    def take(self, control: Control) -> list[ControlDone]:
        """A command. Returns the answers that there are now, perhaps to earlier ones."""
        self._waiting.append(control)
        return self.poll()

    def poll(self) -> list[ControlDone]:
        """The answers to commands that have been carried out since."""
        answers: list[ControlDone] = []
        if self._draining and not self._lifecycle.is_draining:
            answers.append(self._done(self._draining, {}))
            self._draining = None
        if self._staging and self._staging.future.done():
            answers.append(self._staged(*self._staging))
        while self._waiting and not self._staging:
            if answer := self._attempt(self._waiting.popleft()):
                answers.append(answer)
        return answers

    def drop(self) -> None:
        """Nobody waits for answers any more: what is not carried out is not wanted."""
        self._waiting.clear()
        self._staging = self._prepared = self._draining = None

    def _attempt(self, control: Control) -> ControlDone | None:
        """Carry it out. Returns the answer; None when it comes later."""
        try:
            results = self._carry_out(control)
        except (HomingError, OSError) as error:
            return self._failed(control, error)
        return None if results is None else self._done(control, results)

    def _carry_out(self, control: Control) -> Results | None:
        lifecycle = self._lifecycle
        match control.command:
            case Command.PAUSE:
                lifecycle.pause(_arguments(control.arguments, Pause).mode)
                if lifecycle.is_draining:
                    self._draining = control
                    return None
            case Command.UNPAUSE:
                lifecycle.unpause()
            case Command.SUSPEND:
                asked = _arguments(control.arguments, Suspend)
                return dataclasses.asdict(lifecycle.suspend(asked.kv, asked.weights))
            case Command.RESUME:
                lifecycle.resume()
            case Command.SET_EPOCH:
                lifecycle.begin_epoch(_arguments(control.arguments, SetEpoch).epoch)
            case Command.RESET_PREFIX_CACHE:
                return {"dropped_blocks": lifecycle.reset_prefix_cache()}
            case Command.RESET:
                return {"dropped_blocks": lifecycle.reset()}
            case Command.SHUTDOWN:
                self._engine.abort_all()
                self.is_stopping = True
            case Command.UPDATE_WEIGHTS:
                return self._update(control, _arguments(control.arguments, UpdateWeights))
            case _:
                assert_never(control.command)
        return {}

    # Updates of the weights

    def _update(self, control: Control, update: UpdateWeights) -> Results | None:
        match update.phase:
            case UpdatePhase.PREPARE | UpdatePhase.APPLY:
                self._prepared = None
                if update.partial and update.base_epoch != self._lifecycle.epoch:
                    raise NotAllowed(
                        f"a partial update of epoch {update.base_epoch}; "
                        f"the weights here are of epoch {self._lifecycle.epoch}"
                    )
                self._staging = _Staging(control, update, self._start(update))
                return None
            case UpdatePhase.ROLLBACK:
                self._prepared = None
            case UpdatePhase.COMMIT:
                if self._prepared is None or self._prepared[0].epoch != update.epoch:
                    raise NotAllowed(f"no weights of epoch {update.epoch} are prepared")
                self._swap(*self._prepared)
            case _:
                assert_never(update.phase)
        return {}

    def _start(self, update: UpdateWeights) -> Future[StagedWeights]:
        """Prepare an update on another thread. It may be cut short by the end of the process: the
        model that serves does not change."""
        future: Future[StagedWeights] = Future()

        def run() -> None:
            try:
                with open_source(update, self._engine.runner.model, self.rank) as tensors:
                    staged = self._lifecycle.stage(tensors, partial=update.partial, owned=True)
            except Exception as error:
                if not isinstance(error, HomingError | OSError):
                    log.exception("an update could not be prepared")
                future.set_exception(error)
            else:
                future.set_result(staged)
            self._engine.wake()

        threading.Thread(target=run, name="homing-weight-update", daemon=True).start()
        return future

    def _staged(
        self, control: Control, update: UpdateWeights, future: Future[StagedWeights]
    ) -> ControlDone:
        self._staging = None
        if error := future.exception():
            log.warning("the old weights stay", extra={"why": str(error)})
            return self._failed(control, error)
        staged = future.result()
        if update.phase is UpdatePhase.APPLY:
            self._swap(update, staged)
        else:
            self._prepared = (update, staged)
        results = {
            field.name: getattr(staged, field.name)
            for field in dataclasses.fields(staged)
            if field.name != "model"
        }
        log.info("new weights are prepared", extra=results)
        return self._done(control, results)

    def _swap(self, update: UpdateWeights, staged: StagedWeights) -> None:
        self._prepared = None
        self._lifecycle.swap(staged, in_flight=update.in_flight, epoch=update.epoch)
        is_repeatable = update.source is WeightSource.DIRECTORY and not update.partial
        whole = structs.replace(update, phase=UpdatePhase.PREPARE)
        self.weights_from = pack_payload(whole) if is_repeatable else None

    # Answers

    def _done(self, control: Control, results: Results) -> ControlDone:
        self.sequence = max(self.sequence, control.sequence)
        results["unfinished_requests"] = self._engine.num_unfinished_requests
        return ControlDone(
            control.command, control.sequence, ok=True, results=pack_payload(results)
        )

    def _failed(self, control: Control, error: BaseException) -> ControlDone:
        why = str(error) or type(error).__name__
        results = pack_payload({"error": why})
        return ControlDone(control.command, control.sequence, False, clip(why), results)


T = TypeVar("T")


def _arguments(arguments: Payload, kind: type[T]) -> T:
    try:
        return read_payload(arguments or b"\x80", kind)
    except WireError as error:
        raise InvalidRequest(f"the arguments are not those of the command: {error}") from None
