"""A worker with an engine on the fake model, and a socket that follows a script."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from typing_extensions import Buffer

from homing.engine.session import EngineSession
from homing.engine.worker import Worker
from homing.params import SamplingParams
from homing.transport import Dealer
from homing.wire import (
    PROTOCOL_VERSION,
    FleetState,
    Message,
    ModelCard,
    Submit,
    Welcome,
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
