"""What the worker does while a device computes a step, with a runner that stands for one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from torch import Tensor
from typing_extensions import Buffer

from homing.engine.batch import Placement
from homing.engine.engine import Engine
from homing.engine.plan import Chunk, StepPlan
from homing.engine.runner import Runner
from homing.engine.sampling import Sampled, Sampler
from homing.engine.session import EngineSession
from homing.engine.worker import Worker
from homing.wire import (
    Abort,
    Command,
    Control,
    ControlDone,
    Delta,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Output,
    pack,
    read_payload,
)
from homing.wire.messages import ToEngine
from tests.support.fake_model import expected_greedy, make_engine
from tests.support.overlapping import OverlappingRunner
from tests.support.scripted_worker import CARD, SUBMIT, WELCOME, ScriptedDealer, ScriptEnded

OTHER = replace(SUBMIT, request_id=2, prompt=array("I", [9, 8, 7]).tobytes(), num_prompt_tokens=3)
ABORT = Abort(SUBMIT.client, SUBMIT.request_id, SUBMIT.attempt)


class LoggingRunner(OverlappingRunner):
    def __init__(self, runner: Runner, events: list[str]) -> None:
        super().__init__(runner.model, runner.cache, 4, Sampler())
        self._events = events

    def launch(self, plan: StepPlan) -> Tensor:
        self._events.append("launch")
        return super().launch(plan)

    def prepare(self, chunks: Sequence[Chunk], placement: Placement) -> None:
        self._events.append("prepare")
        super().prepare(chunks, placement)

    def collect(self, plan: StepPlan, logits: Tensor) -> Sampled:
        self._events.append("collect")
        return super().collect(plan, logits)


class LoggingDealer(ScriptedDealer):
    def __init__(self, script: Sequence[Sequence[list[Buffer]]], events: list[str]) -> None:
        super().__init__(script)
        self._events = events

    def send(self, frames: Sequence[Buffer]) -> None:
        super().send(frames)
        if not isinstance(self.sent[-1], (Hello, Heartbeat, Goodbye)):
            self._events.append(type(self.sent[-1]).__name__)


class LoggingEngineSession(EngineSession):
    events: list[str]

    def handle(self, message: ToEngine, now: float) -> list[Message]:
        self.events.append(f"take {type(message).__name__}")
        return super().handle(message, now)


def run(script: Sequence[Sequence[Message]]) -> tuple[list[str], list[Message], Engine]:
    """Each entry of the script is what one look at the socket finds: of two looks in each step, the
    second is while the device computes."""
    events: list[str] = []
    engine, _ = make_engine(eos=())
    engine.runner = LoggingRunner(engine.runner, events)
    session = LoggingEngineSession(engine, CARD, uid=7, rank=0, join_timeout_s=60.0)
    session.events = events
    dealer = LoggingDealer([[pack(message) for message in entry] for entry in script], events)
    with pytest.raises(ScriptEnded):
        Worker(engine, session, dealer).run()
    return events[1:], dealer.sent, engine  # without the Welcome


def answers(sent: Sequence[Message], request_id: int) -> list[Delta]:
    outputs = [message for message in sent if isinstance(message, Output)]
    deltas = [
        delta for output in outputs for delta in read_payload(output.deltas or b"", list[Delta])
    ]
    return [delta for delta in deltas if delta.request_id == request_id]


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in array("I", delta.tokens)]


def test_a_step_is_answered_while_the_next_one_runs() -> None:
    submit = replace(SUBMIT, max_new_tokens=3)
    events, sent, _ = run([[WELCOME], [submit], [], [], [], [], [], [], []])
    assert events == [
        *("take Submit", "launch", "collect"),
        *("launch", "Output", "prepare", "collect"),
        *("launch", "Output", "collect"),
        "Output",
    ]
    assert tokens(answers(sent, 1)) == expected_greedy([5, 6], 3)


def test_the_next_step_is_prepared_behind_all_else_and_used_if_it_comes_to_that() -> None:
    events, sent, engine = run([[WELCOME], [SUBMIT], [], [], [], [], [OTHER], *[[]] * 20])
    assert events[3:11] == [
        *("launch", "Output", "prepare", "collect"),
        *("launch", "Output", "take Submit", "prepare"),
    ]
    assert tokens(answers(sent, 1)) == expected_greedy([5, 6], 5)
    assert tokens(answers(sent, 2)) == expected_greedy([9, 8, 7], 5)
    assert engine.runner.num_foreseen_steps > 0


def test_new_requests_are_taken_on_while_a_step_runs() -> None:
    events, sent, _ = run([[WELCOME], [SUBMIT], [OTHER], *[[]] * 20])
    assert events[:7] == [
        *("take Submit", "launch", "take Submit", "collect"),
        *("launch", "Output", "collect"),
    ]
    assert tokens(answers(sent, 1)) == expected_greedy([5, 6], 5)
    assert tokens(answers(sent, 2)) == expected_greedy([9, 8, 7], 5)


def test_a_heartbeat_holds_nothing_up_that_comes_behind_it() -> None:
    events, _, _ = run([[WELCOME], [SUBMIT], [Heartbeat(1), OTHER], *[[]] * 20])
    assert events[:5] == ["take Submit", "launch", "take Heartbeat", "take Submit", "collect"]


def test_an_abort_waits_for_the_step_that_works_on_its_request() -> None:
    events, sent, engine = run([[WELCOME], [SUBMIT], [], [], [ABORT], *[[]] * 6])
    assert events == [
        *("take Submit", "launch", "collect"),
        *("launch", "Output", "prepare", "collect"),
        *("take Abort", "Output"),
    ]
    deltas = answers(sent, 1)
    assert tokens(deltas) == expected_greedy([5, 6], 2)
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason is FinishReason.ABORT
    engine.scheduler.check()
    assert engine.block_pool.num_held == 0


def test_what_comes_behind_something_that_waits_waits_too() -> None:
    pause = Control(Command.PAUSE, 1)
    events, sent, engine = run([[WELCOME], [SUBMIT], [pause, OTHER], [], []])
    assert events == [
        *("take Submit", "launch", "collect"),
        *("take Control", "Output", "ControlDone"),
        "take Submit",
    ]
    assert len(tokens(answers(sent, 1))) == 1
    assert sum(isinstance(message, ControlDone) for message in sent) == 1
    assert len(engine.scheduler.waiting) == 1


def test_a_newer_attempt_waits_for_the_step_that_works_on_the_older() -> None:
    newer = replace(SUBMIT, attempt=1)
    events, sent, engine = run([[WELCOME], [SUBMIT], [newer], *[[]] * 20])
    assert events[:4] == ["take Submit", "launch", "collect", "take Submit"]
    assert [delta.attempt for delta in answers(sent, 1)] == [1] * 5
    assert tokens(answers(sent, 1)) == expected_greedy([5, 6], 5)
    engine.scheduler.check()


def test_garbage_during_a_step_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    engine, _ = make_engine(eos=())
    engine.runner = LoggingRunner(engine.runner, events)
    session = EngineSession(engine, CARD, uid=7, rank=0, join_timeout_s=60.0)
    garbage: list[list[Buffer]] = [[b"\xff\xff"], pack(OTHER)]
    dealer = LoggingDealer([[pack(WELCOME)], [pack(SUBMIT)], garbage, *[[]] * 16], events)
    with pytest.raises(ScriptEnded):
        Worker(engine, session, dealer).run()
    assert caplog.text.count("dropped a message") == 1
    assert tokens(answers(dealer.sent, 2)) == expected_greedy([9, 8, 7], 5)
