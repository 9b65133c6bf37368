"""Requests that somebody wants to end: what is sent, and what their streams still bring."""

from __future__ import annotations

import asyncio

from homing.params import SamplingParams
from homing.wire import (
    Abort,
    AbortMatched,
    AbortMatching,
    Delta,
    Finish,
    FinishReason,
    Lost,
    LostReason,
    Submit,
)
from tests.support.joined_client import joined, output, parts_of, uint32


async def test_abort_keeps_what_was_generated():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        rid = submit.request_id
        await generation.abort()
        await generation.abort()
        _, abort = await coordinator.next(Abort)
        assert (abort.request_id, abort.attempt) == (rid, 0)
        aborted = Finish(FinishReason.ABORT)
        coordinator.send(peer, output(client, Delta(rid, 0, uint32(10), finish=aborted)))
        parts = await parts_of(generation)
        assert parts[-1].token_ids == [10]
        assert parts[-1].finish == aborted


async def test_an_aborted_request_whose_engine_dies_is_not_submitted_again():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        await generation.abort()
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LOST))
        parts = await parts_of(generation)
        assert parts[-1].finish == Finish(FinishReason.ABORT)


async def test_a_request_that_somebody_else_aborted_ends_with_its_engine():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams(num_tokens_to_generate=4))
        _, submit = await coordinator.next(Submit)
        delta = Delta(submit.request_id, 0, uint32(10), num_cached_tokens=0)
        coordinator.send(peer, output(client, delta))
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.ABORTED))
        parts = await parts_of(generation)
        assert [part.token_ids for part in parts] == [[10], []]
        assert parts[-1].finish == Finish(FinishReason.ABORT)


async def test_requests_are_aborted_by_the_digest_of_their_outside_name():
    async with joined() as (coordinator, client, peer):
        client.submit(uint32(5), SamplingParams(), external_id="a")
        client.submit(uint32(5), SamplingParams())
        _, named = await coordinator.next(Submit)
        _, nameless = await coordinator.next(Submit)
        assert nameless.external_digest is None
        asking = asyncio.create_task(client.abort_matching("a"))
        _, asked = await coordinator.next(AbortMatching)
        assert asked.external_digest == named.external_digest
        coordinator.send(peer, AbortMatched(asked.token, 3))
        assert await asking == 3
        asking = asyncio.create_task(client.abort_matching(None))
        _, asked = await coordinator.next(AbortMatching)
        assert asked.external_digest is None
        coordinator.send(peer, AbortMatched(asked.token, 0))
        assert await asking == 0


async def test_a_cancelled_request_is_aborted_and_forgotten():
    async with joined() as (coordinator, client, _):
        generation = client.submit(uint32(5), SamplingParams())
        generation.cancel()
        await coordinator.next(Abort)
        assert not client._generations
