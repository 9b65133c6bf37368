"""What the client does when ranks die, leave or are not there, and when time is up."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from homing.errors import InvalidRequest, NotAllowed, RequestLost, Unavailable
from homing.params import SamplingParams
from homing.wire import (
    Abort,
    Delta,
    Drain,
    Drained,
    Finish,
    FinishReason,
    Lost,
    LostReason,
    PromptLogProbs,
    Submit,
)
from tests.support.joined_client import STOPPED, fleet_of, float32, joined, output, parts_of, uint32


async def test_a_lost_engine_s_request_goes_on_from_its_tokens_without_gap_or_repeat():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5, 6), SamplingParams(num_tokens_to_generate=4))
        _, submit = await coordinator.next(Submit)
        rid = submit.request_id
        coordinator.send(peer, output(client, Delta(rid, 0, uint32(10, 11), num_cached_tokens=0)))
        coordinator.send(peer, Lost(rid, 0, LostReason.RANK_LOST))
        _, again = await coordinator.next(Submit)
        assert (again.attempt, again.num_resumed_tokens, again.max_new_tokens) == (1, 2, 2)
        assert again.prompt == uint32(5, 6, 10, 11)
        coordinator.send(peer, output(client, Delta(rid, 0, uint32(77))))  # of the dead attempt
        done = Delta(
            rid, 1, uint32(12, 13), num_cached_tokens=3, finish=Finish(FinishReason.LENGTH)
        )
        coordinator.send(peer, output(client, done))
        parts = await parts_of(generation)
        assert [t for part in parts for t in part.token_ids] == [10, 11, 12, 13]
        assert [part.num_cached_tokens for part in parts] == [0, None]


async def test_prompt_log_probs_that_were_delivered_are_not_computed_again():
    async with joined() as (coordinator, client, peer):
        params = SamplingParams(return_log_probs=True, skip_prompt_log_probs=False)
        client.submit(uint32(5, 6), params)
        _, submit = await coordinator.next(Submit)
        first = Delta(
            submit.request_id, 0, uint32(9), float32(-1), prompt=PromptLogProbs(float32(-1))
        )
        coordinator.send(peer, output(client, first))
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LOST))
        _, again = await coordinator.next(Submit)
        assert not SamplingParams.from_bytes(again.sampling).wants_prompt_log_probs


async def test_a_request_that_killed_two_engines_is_not_sent_to_a_third():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        for attempt in range(2):
            _, submit = await coordinator.next(Submit)
            coordinator.send(peer, Lost(submit.request_id, attempt, LostReason.RANK_LOST))
        with pytest.raises(RequestLost, match="2 engines"):
            await parts_of(generation)
        client.submit(uint32(6), SamplingParams())
        _, following = await coordinator.next(Submit)
        assert following.prompt == uint32(6)


async def test_the_suspects_of_a_death_go_on_one_after_the_other():
    """Who had brought no token is first, the oldest of them: an engine dies of what it begins."""
    async with joined() as (coordinator, client, peer):
        for number in range(4):
            client.submit(uint32(10 + number), SamplingParams())
            _, submit = await coordinator.next(Submit)
            assert submit.request_id == number + 1
        hear = client._on_request_message  # a socket might hand a burst over in parts
        hear(output(client, Delta(1, 0, uint32(5)), Delta(2, 0, uint32(5))))
        for request_id in (2, 4, 1, 3):
            hear(Lost(request_id, 0, LostReason.RANK_LOST))
        for request_id in (3, 4, 1):
            _, again = await coordinator.next(Submit)
            assert (again.request_id, again.attempt) == (request_id, 1)
            await asyncio.sleep(0.1)
            coordinator.hear()
            assert not coordinator.heard, "the next waits"
            coordinator.send(peer, output(client, Delta(request_id, 1, uint32(6))))
        _, again = await coordinator.next(Submit)
        assert again.request_id == 2


async def test_a_suspect_that_dies_again_or_takes_long_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("homing.client.suspects.PROBATION_S", 0.3)
    async with joined() as (coordinator, client, peer):
        generations = [client.submit(uint32(9), SamplingParams()) for _ in range(3)]
        for _ in generations:
            await coordinator.next(Submit)
        for request_id in (1, 2, 3):
            coordinator.send(peer, Lost(request_id, 0, LostReason.RANK_LOST))
        _, first = await coordinator.next(Submit)
        coordinator.send(peer, Lost(first.request_id, 1, LostReason.RANK_LOST))
        with pytest.raises(RequestLost):
            await parts_of(generations[first.request_id - 1])
        _, second = await coordinator.next(Submit)
        _, third = await coordinator.next(Submit)  # though nothing came of the second
        assert {first.request_id, second.request_id, third.request_id} == {1, 2, 3}


async def test_engines_that_leave_on_purpose_are_not_held_against_a_request():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        reasons = [LostReason.RANK_LEFT, LostReason.RANK_LOST, *[LostReason.RANK_LEFT] * 5]
        for attempt, reason in enumerate(reasons):
            _, submit = await coordinator.next(Submit)
            assert submit.attempt == attempt
            coordinator.send(peer, Lost(submit.request_id, attempt, reason))
        _, submit = await coordinator.next(Submit)
        done = Delta(submit.request_id, submit.attempt, uint32(9), finish=STOPPED)
        coordinator.send(peer, output(client, done))
        [part] = await parts_of(generation)
        assert part.token_ids == [9]


async def test_a_request_without_any_rank_left_waits_for_one_and_goes_on():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams(num_tokens_to_generate=2))
        _, submit = await coordinator.next(Submit)
        rid = submit.request_id
        coordinator.send(peer, output(client, Delta(rid, 0, uint32(10))))
        coordinator.send(peer, Lost(rid, 0, LostReason.RANK_LOST))
        coordinator.send(peer, fleet_of(1, live_ranks=0))
        await coordinator.next(Submit)
        coordinator.send(peer, Lost(rid, 1, LostReason.NO_RANK))
        coordinator.send(peer, fleet_of(2, live_ranks=1))
        _, again = await coordinator.next(Submit)
        assert (again.attempt, again.num_resumed_tokens) == (2, 1)
        done = Delta(rid, 2, uint32(11), finish=Finish(FinishReason.LENGTH))
        coordinator.send(peer, output(client, done))
        assert [t for part in await parts_of(generation) for t in part.token_ids] == [10, 11]


async def test_a_request_without_any_rank_left_fails_when_none_comes():
    async with joined(patience_s=0.2) as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LOST))
        coordinator.send(peer, fleet_of(1, live_ranks=0))
        await coordinator.next(Submit)
        coordinator.send(peer, Lost(submit.request_id, 1, LostReason.NO_RANK))
        with pytest.raises(Unavailable, match="no engine has come"):
            async with asyncio.timeout(30):
                await parts_of(generation)


async def test_each_attempt_is_told_the_time_that_is_left():
    async with joined() as (coordinator, client, peer):
        client.submit(uint32(5), SamplingParams(), priority=-2, timeout_s=100.0)
        _, submit = await coordinator.next(Submit)
        assert (submit.priority, submit.deadline_s) == (-2, pytest.approx(100.0, abs=5))
        await asyncio.sleep(0.05)
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LOST))
        _, again = await coordinator.next(Submit)
        assert again.priority == -2
        assert (again.deadline_s or 0.0) < (submit.deadline_s or 0.0)


async def test_a_deadline_holds_though_no_engine_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("homing.client.client.DEADLINE_GRACE_S", 0.1)
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams(), timeout_s=0.1)
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, output(client, Delta(submit.request_id, 0, uint32(10))))
        async with asyncio.timeout(30):
            parts = await parts_of(generation)
        assert [part.token_ids for part in parts] == [[10], []]
        assert parts[-1].finish == Finish(FinishReason.ABORT, detail="its deadline passed")
        await coordinator.next(Abort)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"priority": 2**31}, "priority"), ({"timeout_s": 0.0}, "timeout_s")]
    + [({"timeout_s": value}, "timeout_s") for value in (-1.0, math.nan, math.inf)],
)
async def test_urgencies_that_cannot_be_sent_are_refused(options: dict[str, Any], field: str):
    async with joined() as (_, client, _):
        with pytest.raises(InvalidRequest) as caught:
            client.submit(uint32(5), SamplingParams(), **options)
        assert caught.value.field == field


async def test_drain_returns_when_the_rank_has_gone_and_says_why_it_cannot():
    async with joined() as (coordinator, client, peer):
        draining = asyncio.create_task(client.drain(3, timeout_s=7.0))
        _, drain = await coordinator.next(Drain)
        assert (drain.rank, drain.timeout_s) == (3, 7.0)
        assert not draining.done()
        coordinator.send(peer, Drained(drain.token, True))
        await draining
        draining = asyncio.create_task(client.drain(4))
        _, drain = await coordinator.next(Drain)
        coordinator.send(peer, Drained(drain.token, False, "there is no rank 4"))
        with pytest.raises(NotAllowed, match="no rank 4"):
            await draining


async def test_a_request_that_had_a_rank_comes_again_to_a_full_fleet_and_gives_up_in_the_end():
    async with joined(patience_s=1.5) as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LEFT))
        ending = asyncio.create_task(parts_of(generation))
        refusals = 0
        async with asyncio.timeout(30):
            while not ending.done():
                try:
                    _, again = await coordinator.next(Submit, 1.0)
                except AssertionError:
                    continue
                refusals += 1
                refusal = Lost(again.request_id, again.attempt, LostReason.OVERLOADED, 1.0, "full")
                coordinator.send(peer, refusal)
        with pytest.raises(Unavailable, match="no engine has come"):
            await ending
        assert refusals > 1
