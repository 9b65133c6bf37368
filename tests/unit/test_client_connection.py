"""The client and its coordinator: joining, questions, a restart, silence, garbage and the end."""

from __future__ import annotations

import asyncio

import pytest

from homing.client import Client
from homing.errors import ConfigError, NotAllowed, Unavailable
from homing.params import SamplingParams
from homing.wire import (
    Command,
    Control,
    ControlDone,
    Delta,
    Goodbye,
    Hello,
    Lost,
    LostReason,
    Output,
    Refused,
    Rejoin,
    Stats,
    StatsReply,
    Submit,
    pack_payload,
)
from tests.support.joined_client import STOPPED, fleet_of, joined, output, parts_of, uint32
from tests.support.scripted_coordinator import ScriptedCoordinator


async def test_a_restarted_coordinator_gets_every_unfinished_request_again():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        rid = submit.request_id
        coordinator.send(peer, output(client, Delta(rid, 0, uint32(10))))
        coordinator.send(peer, Rejoin(8))
        coordinator.send(peer, Rejoin(8))
        sender, hello = await coordinator.next(Hello)
        assert hello.incarnation == 1
        coordinator.heard.append((sender, hello))
        await coordinator.welcome(live_ranks=0)
        # No engine has rejoined: the request waits, it does not fail. So does a new one.
        coordinator.send(peer, fleet_of(1, live_ranks=0))
        while client.fleet.live_ranks:
            await asyncio.sleep(0.01)
        later = client.submit(uint32(7), SamplingParams())
        coordinator.send(peer, fleet_of(2, live_ranks=1))
        _, again = await coordinator.next(Submit)
        assert (again.attempt, again.num_resumed_tokens) == (1, 1)
        _, second = await coordinator.next(Submit)
        answer = Delta(second.request_id, second.attempt, uint32(3), finish=STOPPED)
        coordinator.send(peer, output(client, answer))
        assert [p.token_ids for p in await parts_of(later)] == [[3]]
        coordinator.send(peer, output(client, Delta(rid, 1, uint32(2), finish=STOPPED)))
        assert [p.token_ids for p in await parts_of(generation)] == [[10], [2]]


async def test_a_request_that_met_a_restarted_coordinator_without_ranks_waits_for_them():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, Rejoin(8))
        coordinator.heard.append(await coordinator.next(Hello))
        await coordinator.welcome(live_ranks=0)
        # It was behind the Hello, so it was looked at and refused: no rank had come back.
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.NO_RANK))
        coordinator.send(peer, fleet_of(1, live_ranks=1))
        _, again = await coordinator.next(Submit)
        assert again.attempt == 1
        answer = Delta(again.request_id, 1, uint32(3), finish=STOPPED)
        coordinator.send(peer, output(client, answer))
        assert [p.token_ids for p in await parts_of(generation)] == [[3]]


async def test_requests_fail_in_bounded_time_when_nothing_answers_any_more(monkeypatch):
    monkeypatch.setattr("homing.client.session.SILENCE_S", 0.1)
    async with joined(patience_s=0.3) as (coordinator, client, _):
        generation = client.submit(uint32(5), SamplingParams())
        await coordinator.next(Submit)
        with pytest.raises(Unavailable, match="does not answer"):
            await asyncio.wait_for(parts_of(generation), 30)
        with pytest.raises(Unavailable):
            client.submit(uint32(5), SamplingParams())
        assert not client.fleet.connected


async def test_control_and_stats_pair_answers_with_questions():
    async with joined() as (coordinator, client, peer):
        pausing = asyncio.create_task(client.control(Command.PAUSE))
        _, pause = await coordinator.next(Control)
        asking = asyncio.create_task(client.stats())
        _, stats = await coordinator.next(Stats)
        refused = asyncio.create_task(client.control(Command.UNPAUSE))
        _, unpause = await coordinator.next(Control)
        done = ControlDone(Command.UNPAUSE, unpause.sequence, False, "not paused")
        coordinator.send(peer, done)
        coordinator.send(peer, StatsReply(stats.token, pack_payload({"clients": 1})))
        results = pack_payload({0: {"ok": True}})
        coordinator.send(peer, ControlDone(Command.PAUSE, pause.sequence, True, "", results))
        assert await asking == {"clients": 1}
        assert await pausing == {0: {"ok": True}}
        with pytest.raises(NotAllowed, match="not paused"):
            await refused


async def test_a_question_that_nobody_answers_is_given_up():
    async with joined() as (_, client, _peer):
        with pytest.raises(Unavailable):
            await client.stats(timeout_s=0.05)


async def test_no_coordinator_and_a_refusing_one_are_told_apart(tmp_path):
    client = Client(f"ipc://{tmp_path}/nobody")
    with pytest.raises(Unavailable, match="no coordinator answers"):
        await client.start(0.1)
    with ScriptedCoordinator() as coordinator:
        client = Client(coordinator.address)
        starting = asyncio.create_task(client.start(30))
        sender, _ = await coordinator.next(Hello)
        coordinator.send(sender, Refused("protocol version 1; this is 2"))
        with pytest.raises(ConfigError, match="protocol version"):
            await starting


async def test_closing_says_goodbye_and_fails_what_is_unfinished():
    async with joined() as (coordinator, client, _):
        generation = client.submit(uint32(5), SamplingParams())
        await client.close()
        await client.close()
        await coordinator.next(Goodbye)
        with pytest.raises(Unavailable, match="closed"):
            await parts_of(generation)


async def test_a_closed_client_takes_no_request():
    async with joined() as (_, client, _):
        await client.close()
        for prompt in (uint32(5), uint32(*range(5000))):
            with pytest.raises(Unavailable):
                client.submit(prompt, SamplingParams())


async def test_garbage_from_the_coordinator_is_dropped():
    async with joined() as (coordinator, client, peer):
        coordinator.router.send(peer, [b"\xc1garbage"])
        coordinator.send(peer, Output(client._session.uid, 1, 0, None, b"\x81"))
        coordinator.send(peer, Goodbye())
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        done = Delta(submit.request_id, 0, uint32(2), finish=STOPPED)
        coordinator.send(peer, output(client, done))
        assert len(await parts_of(generation)) == 1
