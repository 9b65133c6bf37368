"""One name for a request in the logs of every process, and its name outside beside it once."""

from __future__ import annotations

import logging

import pytest

from homing.params import SamplingParams
from homing.wire import Lost, LostReason, Submit
from tests.support.coordinator_fleet import Fleet, output
from tests.support.coordinator_fleet import submit as coordinator_submit
from tests.support.engine_session import joined as engine_joined
from tests.support.engine_session import step
from tests.support.engine_session import submit as engine_submit
from tests.support.joined_client import joined, uint32


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, int]]:
    """What was said of requests: the message, the request's name, its attempt."""
    named = [record for record in caplog.records if hasattr(record, "request")]
    return [(r.message, r.request, r.attempt) for r in named]  # type: ignore[attr-defined]


async def test_the_client_names_its_requests(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "homing")
    async with joined() as (coordinator, client, peer):
        client.submit(uint32(5), SamplingParams(), external_id="cmpl-7")
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LEFT))
        await coordinator.next(Submit)
        name = f"{submit.client:x}/1"
        assert lines(caplog) == [("submitted", name, 0), ("submitted again", name, 1)]
        assert [r.external_id for r in caplog.records if r.message == "submitted"] == ["cmpl-7"]  # type: ignore[attr-defined]


def test_the_coordinator_names_them_alike(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "homing")
    fleet = Fleet()
    fleet.join_engine()
    fleet.join_client(30)
    fleet.say(b"c30", coordinator_submit(30, 4))
    fleet.say(b"e0", output((4, 0), client=30))
    assert lines(caplog) == [("dispatched", "1e/4", 0), ("ended", "1e/4", 0)]


def test_the_engine_names_them_alike(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "homing")
    session, engine = engine_joined()
    session.handle(engine_submit(30, 4), 1.0)
    while engine.has_unfinished_requests:
        step(session, engine)
    assert lines(caplog) == [("took on", "1e/4", 0), ("finished", "1e/4", 0)]
