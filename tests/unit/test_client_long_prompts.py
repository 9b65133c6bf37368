"""Prompts whose hashes are made in a thread: what is sent, when, and what never is."""

from __future__ import annotations

import array
import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from homing.client import Client, fleet, submitter
from homing.errors import InternalError, InvalidRequest, LoanGone
from homing.params import SamplingParams
from homing.prefix import routing_hashes
from homing.transport import borrow, loans
from homing.wire import (
    AbortMatched,
    AbortMatching,
    Delta,
    Finish,
    FinishReason,
    Hello,
    Lost,
    LostReason,
    Rejoin,
    Submit,
)
from tests.support import joined_client
from tests.support.joined_client import STOPPED, uint32
from tests.support.scripted_coordinator import CARD, ScriptedCoordinator

LONG = array.array("I", range(90)).tobytes()
SHORT = LONG[:20]
HASHES = routing_hashes(LONG, CARD.block_size)
PARAMS = SamplingParams(num_tokens_to_generate=1, seed=1)


@pytest.fixture
def gate(monkeypatch) -> Iterator[threading.Event]:
    """What the thread waits for before it hashes a prompt."""
    gate = threading.Event()

    def gated(tokens: bytes, block_size: int, salt: bytes) -> bytes:
        assert len(tokens) < len(LONG) or gate.wait(30)
        return routing_hashes(tokens, block_size, salt)

    monkeypatch.setattr(submitter, "LONG_PROMPT_BYTES", len(LONG))
    monkeypatch.setattr(fleet, "routing_hashes", gated)
    yield gate
    gate.set()


@pytest.fixture
async def joined(gate) -> AsyncIterator[tuple[ScriptedCoordinator, Client, bytes]]:
    """A coordinator, a client that has joined it, and the client's identity."""
    async with joined_client.joined() as those:
        yield those


async def test_a_short_prompt_overtakes_a_long_one_that_is_being_hashed(joined, gate):
    coordinator, client, _ = joined
    client.submit(LONG, PARAMS)
    client.submit(SHORT, PARAMS)
    assert (await coordinator.next(Submit))[1].prompt == SHORT
    gate.set()
    _, submit = await coordinator.next(Submit)
    assert (submit.prompt, submit.block_hashes) == (LONG, HASHES)


async def test_a_request_that_is_aborted_while_its_prompt_is_hashed_is_never_sent(joined, gate):
    coordinator, client, _ = joined
    aborted, cancelled = client.submit(LONG, PARAMS), client.submit(LONG, PARAMS)
    await aborted.abort()
    cancelled.cancel()
    [last] = [part async for part in aborted]
    assert last.finish is not None
    assert last.finish.reason is FinishReason.ABORT
    gate.set()
    third = client.submit(LONG, PARAMS)  # hashed after them
    assert (await coordinator.next(Submit))[1].request_id == third.request_id


async def test_an_abort_by_name_comes_after_the_requests_submitted_before_it(joined, gate):
    coordinator, client, peer = joined
    client.submit(LONG, PARAMS, external_id="mine")
    aborting = asyncio.create_task(client.abort_matching("mine"))
    await asyncio.sleep(0)
    gate.set()
    _, submit = await coordinator.next(Submit)
    _, abort = await coordinator.next(AbortMatching)
    assert abort.external_digest == submit.external_digest
    coordinator.send(peer, AbortMatched(abort.token, 1))
    assert await aborting == 1


async def test_after_a_rejoin_a_prompt_that_was_being_hashed_is_sent_once(joined, gate):
    """Its first attempt would be one that nobody waits for."""
    coordinator, client, peer = joined
    client.submit(LONG, PARAMS)
    coordinator.send(peer, Rejoin(8))
    await coordinator.welcome()
    gate.set()
    _, submit = await coordinator.next(Submit)
    assert (submit.attempt, submit.prompt) == (1, LONG)
    client.submit(SHORT, PARAMS)
    assert (await coordinator.next(Submit))[1].prompt == SHORT


async def test_between_a_rejoin_and_its_welcome_nothing_is_sent_and_then_all_of_it_once(joined):
    coordinator, client, peer = joined
    running = client.submit(SHORT, PARAMS)
    await coordinator.next(Submit)
    coordinator.send(peer, Rejoin(8))
    await coordinator.next(Hello)
    new = client.submit(SHORT, PARAMS)
    await asyncio.sleep(0.2)  # several heartbeats
    coordinator.hear()
    assert not any(isinstance(message, Submit) for _, message in coordinator.heard)
    await coordinator.welcome()
    await asyncio.sleep(0.2)
    coordinator.hear()
    submits = [message for _, message in coordinator.heard if isinstance(message, Submit)]
    assert [submit.request_id for submit in submits] == [running.request_id, new.request_id]


async def test_a_long_prompt_is_hashed_again_when_it_is_submitted_again(joined, gate):
    coordinator, client, peer = joined
    gate.set()
    generation = client.submit(LONG, PARAMS)
    _, submit = await coordinator.next(Submit)
    coordinator.send(peer, Lost(submit.request_id, 0, LostReason.RANK_LEFT))
    _, again = await coordinator.next(Submit)
    assert (again.attempt, again.prompt, again.block_hashes) == (1, LONG, HASHES)
    generation.cancel()


@pytest.fixture
def lendable(monkeypatch) -> None:
    """The long prompt is long enough to be lent."""
    monkeypatch.setattr(loans, "MIN_LOAN_BYTES", len(LONG))


@pytest.fixture
async def lending(joined, lendable, gate) -> tuple[ScriptedCoordinator, Client, bytes]:
    gate.set()
    return joined


async def test_a_long_prompt_is_lent_and_taken_back_when_its_engine_answers(lending):
    coordinator, client, peer = lending
    first = client.submit(LONG, PARAMS)
    _, submit = await coordinator.next(Submit)
    assert (submit.prompt, submit.block_hashes) == (None, HASHES)
    assert borrow(submit.lent_at, len(LONG)) == LONG
    delta = Delta(submit.request_id, 0, uint32(9), finish=STOPPED)
    coordinator.send(peer, joined_client.output(client, delta))
    await joined_client.parts_of(first)
    client.submit(LONG[::-1], PARAMS)
    _, again = await coordinator.next(Submit)
    assert again.lent_at[:2] == submit.lent_at[:2]
    assert borrow(again.lent_at, len(LONG)) == LONG[::-1]
    with pytest.raises(LoanGone):
        borrow(submit.lent_at, len(LONG))


@pytest.mark.parametrize("end", ["cancel", "lost"])
async def test_what_nobody_answered_is_not_lent_to_the_next(lending, end):
    """Its engine may come to read it yet."""
    coordinator, client, peer = lending
    generation = client.submit(LONG, PARAMS)
    _, submit = await coordinator.next(Submit)
    if end == "cancel":
        generation.cancel()
    else:
        coordinator.send(peer, Lost(submit.request_id, 0, LostReason.INVALID))
        with pytest.raises(InvalidRequest):
            await anext(generation)
    with pytest.raises(LoanGone):
        borrow(submit.lent_at, len(LONG))


async def test_a_prompt_that_an_engine_cannot_see_is_sent_and_so_are_all_after_it(lending):
    coordinator, client, peer = lending
    generation = client.submit(LONG, PARAMS)
    _, submit = await coordinator.next(Submit)
    unread = Finish(FinishReason.UNREAD, detail="nothing is lent there")
    delta = Delta(submit.request_id, 0, b"", finish=unread)
    coordinator.send(peer, joined_client.output(client, delta))
    _, again = await coordinator.next(Submit)
    assert (again.request_id, again.attempt) == (submit.request_id, 1)
    assert (again.prompt, again.lent_at, again.block_hashes) == (LONG, None, HASHES)
    done = Delta(submit.request_id, 1, uint32(9), finish=STOPPED)
    coordinator.send(peer, joined_client.output(client, done))
    [part] = await joined_client.parts_of(generation)
    assert part.token_ids == [9]
    client.submit(LONG, PARAMS)
    assert (await coordinator.next(Submit))[1].prompt == LONG


async def test_an_engine_that_cannot_see_what_was_sent_is_an_error_and_no_loop(joined, gate):
    coordinator, client, peer = joined
    generation = client.submit(SHORT, PARAMS)
    _, submit = await coordinator.next(Submit)
    delta = Delta(submit.request_id, 0, b"", finish=Finish(FinishReason.UNREAD))
    coordinator.send(peer, joined_client.output(client, delta))
    with pytest.raises(InternalError):
        await anext(generation)


async def test_closing_fails_a_request_whose_prompt_is_being_hashed(joined):
    _, client, _ = joined
    generation = client.submit(LONG, PARAMS)
    await client.close()
    with pytest.raises(Exception, match="client was closed"):
        await anext(generation)
