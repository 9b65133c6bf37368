"""The client against a scripted coordinator: what it sends, and how its streams end."""

from __future__ import annotations

import array
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from homing.client import Client, Generation, Part
from homing.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    RequestLost,
    Unavailable,
)
from homing.params import SamplingParams
from homing.prefix import block_hashes
from homing.wire import (
    Abort,
    AbortMatched,
    AbortMatching,
    Command,
    Control,
    ControlDone,
    Delta,
    Finish,
    FinishReason,
    Fleet,
    FleetState,
    Goodbye,
    Hello,
    Lost,
    LostReason,
    Output,
    PromptLogProbs,
    Refused,
    Rejoin,
    Stats,
    StatsReply,
    Submit,
    TopLogProbs,
    pack_payload,
)
from tests.support.scripted_coordinator import ScriptedCoordinator


def uint32(*ids: int) -> bytes:
    return array.array("I", ids).tobytes()


def float32(*values: float) -> bytes:
    return array.array("f", values).tobytes()


def output(client: Client, *deltas: Delta) -> Output:
    return Output(client._session.uid, len(deltas), 0, None, pack_payload(list(deltas)))


STOPPED = Finish(FinishReason.STOP, 2)


@asynccontextmanager
async def joined(
    *, reads_prefixes: bool = True, **options: Any
) -> AsyncIterator[tuple[ScriptedCoordinator, Client, bytes]]:
    """A coordinator, a client that has joined it, and the client's identity."""
    with ScriptedCoordinator() as coordinator:
        client = Client(coordinator.address, **options)
        starting = asyncio.create_task(client.start(30))
        peer = await coordinator.welcome(reads_prefixes=reads_prefixes)
        await starting
        try:
            yield coordinator, client, peer
        finally:
            await client.close()


async def parts_of(generation: Generation) -> list[Part]:
    return [part async for part in generation]


async def test_a_request_streams_its_parts_and_ends_once():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5, 6, 7, 8, 9), SamplingParams(seed=3))
        _, submit = await coordinator.next(Submit)
        assert (submit.attempt, submit.num_prompt_tokens, submit.num_resumed_tokens) == (0, 5, 0)
        assert submit.max_new_tokens == 95
        assert submit.prompt == uint32(5, 6, 7, 8, 9)
        assert submit.block_hashes == block_hashes(uint32(5, 6, 7, 8), 4)[0]
        request_id = submit.request_id
        first = Delta(
            request_id,
            0,
            uint32(10),
            log_probs=float32(-0.5),
            top=TopLogProbs(2, uint32(10, 11), float32(-0.5, -1.0)),
            num_cached_tokens=4,
            prompt=PromptLogProbs(
                float32(-1, -2, -3, -4), TopLogProbs(1, uint32(1, 2, 3, 4), float32(0, 0, 0, 0))
            ),
        )
        coordinator.send(peer, output(client, first))
        coordinator.send(peer, output(client, Delta(request_id, 0, uint32(11, 2), finish=STOPPED)))
        coordinator.send(peer, output(client, Delta(request_id, 0, uint32(99))))
        parts = await parts_of(generation)
        assert [part.token_ids for part in parts] == [[10], [11, 2]]
        assert parts[0].top == [[(10, -0.5), (11, -1.0)]]
        assert parts[0].num_cached_tokens == 4
        assert parts[0].prompt_log_probs == [None, -1, -2, -3, -4]
        assert list(parts[0].prompt_top) == [None, [(1, 0)], [(2, 0)], [(3, 0)], [(4, 0)]]
        assert parts[1].finish == STOPPED
        assert not client._generations


async def test_prompts_are_not_hashed_for_a_policy_that_reads_no_prefixes():
    async with joined(reads_prefixes=False) as (coordinator, client, _):
        client.submit(uint32(5, 6, 7, 8, 9), SamplingParams(seed=3))
        _, submit = await coordinator.next(Submit)
        assert submit.block_hashes is None


async def test_a_tenant_is_named_to_the_coordinator():
    async with joined() as (coordinator, client, _):
        client.submit(uint32(5), SamplingParams(), tenant=7)
        client.submit(uint32(5), SamplingParams())
        assert [(await coordinator.next(Submit))[1].tenant for _ in range(2)] == [7, None]


async def test_a_request_without_a_seed_is_given_one_that_all_its_attempts_share():
    async with joined() as (coordinator, client, peer):
        client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LOST))
        _, again = await coordinator.next(Submit)
        assert SamplingParams.from_bytes(submit.sampling).seed is not None
        assert again.sampling == submit.sampling


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


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (LostReason.NO_RANK, Unavailable),
        (LostReason.OVERLOADED, Overloaded),
        (LostReason.INVALID, InvalidRequest),
    ],
)
async def test_a_refused_request_raises_the_error_of_its_reason(reason, error):
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        coordinator.send(peer, Lost(submit.request_id, 0, reason, 2.5, "because"))
        with pytest.raises(error, match="because") as caught:
            await parts_of(generation)
        if error is not InvalidRequest:
            assert caught.value.retry_after_s == 2.5


async def test_an_engine_s_error_names_the_field():
    async with joined() as (coordinator, client, peer):
        generation = client.submit(uint32(5), SamplingParams())
        _, submit = await coordinator.next(Submit)
        failed = Finish(FinishReason.ERROR, detail="maximum context length is 3", field="prompt")
        coordinator.send(peer, output(client, Delta(submit.request_id, 0, b"", finish=failed)))
        with pytest.raises(ContextLengthExceeded) as caught:
            await parts_of(generation)
        assert caught.value.field == "prompt"


async def test_a_restarted_coordinator_gets_every_unfinished_request_again():
    with ScriptedCoordinator() as coordinator:
        client = Client(coordinator.address)
        starting = asyncio.create_task(client.start(30))
        peer = await coordinator.welcome()
        await starting
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
        coordinator.send(peer, fleet(live_ranks=0, sequence=1))
        while client.fleet.live_ranks:
            await asyncio.sleep(0.01)
        later = client.submit(uint32(7), SamplingParams())
        coordinator.send(peer, fleet(live_ranks=1, sequence=2))
        _, again = await coordinator.next(Submit)
        assert (again.attempt, again.num_resumed_tokens) == (1, 1)
        _, second = await coordinator.next(Submit)
        answer = Delta(second.request_id, second.attempt, uint32(3), finish=STOPPED)
        coordinator.send(peer, output(client, answer))
        assert [p.token_ids for p in await parts_of(later)] == [[3]]
        coordinator.send(peer, output(client, Delta(rid, 1, uint32(2), finish=STOPPED)))
        assert [p.token_ids for p in await parts_of(generation)] == [[10], [2]]
        await client.close()


def fleet(*, live_ranks: int, sequence: int) -> Fleet:
    return Fleet(sequence, FleetState.RUNNING, 0, "prefix_affinity", True, live_ranks)


async def test_requests_fail_in_bounded_time_when_nothing_answers_any_more(monkeypatch):
    monkeypatch.setattr("homing.client.session.SILENCE_S", 0.1)
    async with joined(patience_s=0.3) as (coordinator, client, _):
        generation = client.submit(uint32(5), SamplingParams())
        await coordinator.next(Submit)
        with pytest.raises(Unavailable, match="does not answer"):
            await asyncio.wait_for(parts_of(generation), 5)
        with pytest.raises(Unavailable):
            client.submit(uint32(5), SamplingParams())
        assert not client.fleet.connected


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


@pytest.mark.parametrize(
    ("prompt", "params", "error", "field"),
    [
        (b"", SamplingParams(), InvalidRequest, "prompt"),
        (b"abc", SamplingParams(), InvalidRequest, "prompt"),
        (uint32(*[5] * 100), SamplingParams(), ContextLengthExceeded, "prompt"),
        (
            uint32(*[5] * 98),
            SamplingParams(num_tokens_to_generate=3),
            ContextLengthExceeded,
            "prompt",
        ),
        (uint32(5), SamplingParams(logit_bias={1000: 1.0}), InvalidRequest, "logit_bias"),
        (uint32(5), SamplingParams(stop_token_ids=(-1,)), InvalidRequest, "stop_token_ids"),
    ],
)
async def test_what_the_model_cannot_serve_is_refused_before_it_is_sent(
    prompt, params, error, field
):
    async with joined() as (coordinator, client, _):
        with pytest.raises(error) as caught:
            client.submit(prompt, params)
        assert caught.value.field == field
        coordinator.hear()
        assert not coordinator.heard


async def test_more_requests_than_the_limit_are_refused_at_once():
    async with joined(max_inflight=1) as (_, client, _peer):
        client.submit(uint32(5), SamplingParams())
        with pytest.raises(Overloaded, match="limit"):
            client.submit(uint32(5), SamplingParams())


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
    await client.close()
    with ScriptedCoordinator() as coordinator:
        client = Client(coordinator.address)
        starting = asyncio.create_task(client.start(30))
        sender, _ = await coordinator.next(Hello)
        coordinator.send(sender, Refused("protocol version 1; this is 2"))
        with pytest.raises(ConfigError, match="protocol version"):
            await starting
        await client.close()


async def test_closing_says_goodbye_and_fails_what_is_unfinished():
    async with joined() as (coordinator, client, _):
        generation = client.submit(uint32(5), SamplingParams())
        await client.close()
        await client.close()
        await coordinator.next(Goodbye)
        with pytest.raises(Unavailable, match="closed"):
            await parts_of(generation)


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


def test_parts_are_joined_where_nothing_is_lost_by_it() -> None:
    first = Part(token_ids=[1], log_probs=[-0.5], num_cached_tokens=3)
    second = Part(token_ids=[2, 3], log_probs=[-1.0, -2.0], finish=Finish(FinishReason.STOP))
    assert first.can_take(second)
    assert first.joined(second) == Part(
        token_ids=[1, 2, 3],
        log_probs=[-0.5, -1.0, -2.0],
        num_cached_tokens=3,
        finish=Finish(FinishReason.STOP),
    )
    assert not second.can_take(first), "nothing follows an end"
    assert not Part([1], epoch=1).can_take(Part([2], epoch=2)), "each token keeps its epoch"
    assert not Part([1]).can_take(Part([2], log_probs=[-1.0]))
