"""An engine's session on the fake model: what it is told, and how to read what it says."""

from __future__ import annotations

from array import array
from typing import Any

from msgspec.structs import replace

from homing.engine.engine import Engine
from homing.engine.session import EngineSession
from homing.params import SamplingParams
from homing.wire import (
    PROTOCOL_VERSION,
    Delta,
    FinishedRequest,
    FleetState,
    Message,
    Output,
    Submit,
    Welcome,
    pack,
    read_payload,
)
from tests.support.fake_model import make_engine
from tests.support.scripted_worker import CARD

PROMPT = [5, 6, 7, 8, 9]
ALICE, BOB = 100, 200


def make_session(**limits: Any) -> tuple[EngineSession, Engine]:
    engine, _ = make_engine(**limits)
    session = EngineSession(engine, CARD, uid=7, rank=3, join_timeout_s=60.0)
    session.start(0.0)
    return session, engine


def joined(**limits: Any) -> tuple[EngineSession, Engine]:
    session, engine = make_session(**limits)
    session.handle(welcome(), 0.0)
    return session, engine


def welcome() -> Welcome:
    return Welcome(
        protocol_version=PROTOCOL_VERSION,
        incarnation=1,
        rank=3,
        state=FleetState.RUNNING,
        epoch=0,
        control_sequence=0,
        policy="round_robin",
        reads_prefixes=False,
        live_ranks=1,
        heartbeat_s=0.5,
    )


def submit(
    client: int = ALICE,
    request_id: int = 1,
    *,
    attempt: int = 0,
    prompt: list[int] | None = None,
    resumed: int = 0,
    max_new_tokens: int = 3,
    **params: Any,
) -> Submit:
    tokens = PROMPT if prompt is None else prompt
    sampling = replace(SamplingParams(temperature=0.0, ignore_eos=True), **params)
    return Submit(
        client,
        request_id,
        attempt,
        len(tokens),
        resumed,
        max_new_tokens,
        prompt=array("I", tokens).tobytes(),
        sampling=sampling.to_bytes(),
    )


def step(session: EngineSession, engine: Engine) -> list[Output]:
    messages = session.outputs(engine.step())
    for message in messages:
        pack(message)
    return [message for message in messages if isinstance(message, Output)]


def deltas(outputs: list[Message] | list[Output]) -> list[Delta]:
    found: list[Delta] = []
    for output in outputs:
        assert isinstance(output, Output)
        part = read_payload(output.deltas or b"", list[Delta])
        assert len(part) == output.num_deltas
        found += part
    return found


def finished(output: Message) -> list[FinishedRequest]:
    assert isinstance(output, Output)
    return read_payload(output.finished or b"\x90", list[FinishedRequest])


def kinds(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]
