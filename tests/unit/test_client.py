"""The client against a scripted coordinator: what it sends, and how its streams end."""

from __future__ import annotations

import pytest

from homing.client import Part
from homing.errors import ContextLengthExceeded, InvalidRequest, Overloaded, Unavailable
from homing.params import SamplingParams
from homing.prefix import block_hashes
from homing.wire import (
    Delta,
    Finish,
    FinishReason,
    Lost,
    LostReason,
    PromptLogProbs,
    Submit,
    TopLogProbs,
)
from tests.support.joined_client import STOPPED, float32, joined, output, parts_of, uint32


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
        assert list(parts[0].prompt_top or ()) == [None, [(1, 0)], [(2, 0)], [(3, 0)], [(4, 0)]]
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
