"""The worker's loop on a socket of the test's own, and what a failure in it does."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import pytest
from typing_extensions import Buffer

from homing.engine.session import EngineSession
from homing.engine.worker import Worker
from homing.errors import ConfigError
from homing.params import SamplingParams
from homing.transport import Dealer
from homing.wire import (
    PROTOCOL_VERSION,
    FleetState,
    Goodbye,
    Hello,
    Message,
    ModelCard,
    Output,
    Refused,
    Stats,
    Submit,
    Welcome,
    pack,
    parse,
)
from tests.support.fake_model import FakeModel, make_engine

CARD = ModelCard(
    name="fake",
    tokenizer_dir="",
    max_context_tokens=128,
    vocab_size=32,
    eos_token_ids=(2,),
    block_size=4,
)
WELCOME = Welcome(PROTOCOL_VERSION, 1, 0, FleetState.RUNNING, 0, 0, "round_robin", False, 1, 0.5)
SUBMIT = Submit(
    1,
    1,
    0,
    2,
    0,
    5,
    prompt=array("I", [5, 6]).tobytes(),
    sampling=SamplingParams(temperature=0.0).to_bytes(),
)


class ScriptEnded(BaseException):
    """The loop asked for more than the script holds."""


class ScriptedDealer(Dealer):
    """Hands out one entry of the script for each time the loop receives."""

    def __init__(self, script: Sequence[Sequence[list[Buffer]]]) -> None:
        self.sent: list[Message] = []
        self.timeouts: list[float] = []
        self.closed = False
        self._script = iter(script)

    def receive(self, timeout_s: float) -> Iterator[list[Buffer]]:
        self.timeouts.append(timeout_s)
        try:
            yield from next(self._script)
        except StopIteration:
            raise ScriptEnded from None

    def send(self, frames: Sequence[Buffer]) -> None:
        assert not self.closed
        self.sent.append(parse(frames))

    def wake(self) -> None:
        raise AssertionError("nothing here works on another thread")

    def close(self, *, linger_s: float = 0.0) -> None:
        self.closed = True


def make_worker(
    script: Sequence[Sequence[list[Buffer]]],
) -> tuple[Worker, ScriptedDealer, FakeModel]:
    engine, model = make_engine(eos=())
    session = EngineSession(engine, CARD, uid=7, rank=0, join_timeout_s=60.0)
    dealer = ScriptedDealer(script)
    return Worker(engine, session, dealer), dealer, model


def test_the_loop_waits_only_while_there_is_nothing_to_do():
    worker, dealer, _ = make_worker([[pack(WELCOME)], [pack(SUBMIT)], [], [], [], [], []])
    with pytest.raises(ScriptEnded):
        worker.run()
    assert sum(isinstance(message, Output) for message in dealer.sent) == 5
    waits = [timeout > 0 for timeout in dealer.timeouts]
    assert waits == [True, True, False, False, False, False, True, True]


def test_an_engine_that_stops_says_goodbye():
    worker, dealer, _ = make_worker([[pack(WELCOME)]])
    with pytest.raises(ScriptEnded):
        worker.run()
    assert isinstance(dealer.sent[0], Hello)
    assert isinstance(dealer.sent[-1], Goodbye)
    assert dealer.closed


def test_a_step_that_fails_says_goodbye_and_exits_non_zero(caplog: pytest.LogCaptureFixture):
    worker, dealer, model = make_worker([[pack(WELCOME)], [pack(SUBMIT)], [], []])
    model.failure = RuntimeError("broken kernel")
    with pytest.raises(SystemExit) as caught:
        worker.run()
    assert caught.value.code == 1
    assert isinstance(dealer.sent[-1], Goodbye)
    assert "broken kernel" in caplog.text


def test_a_refusal_ends_the_loop_with_its_reason():
    worker, dealer, _ = make_worker([[pack(Refused("other model"))]])
    with pytest.raises(ConfigError, match="other model"):
        worker.run()
    assert dealer.closed


def test_garbage_is_dropped_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture):
    garbage: list[list[Buffer]] = [[b"\xff\xff"], [b""], pack(Stats(1))]
    worker, dealer, _ = make_worker([[pack(WELCOME), *garbage, pack(SUBMIT)], [], []])
    with pytest.raises(ScriptEnded):
        worker.run()
    assert any(isinstance(message, Output) for message in dealer.sent)
    assert caplog.text.count("dropped a message") == 3
