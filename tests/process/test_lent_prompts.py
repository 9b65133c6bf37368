"""Prompts that are lent to real engines: the same answers as of prompts that are sent."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from homing.transport import Lender, Loan
from tests.support.tiny_fleet import TinyFleet, collect, tiny_fleet
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.timeout(300)

FLAGS = ("--dtype", "fp32", "--max-model-len", "8192")
NUM_TOKENS = 24
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
CAN_UNSHARE = shutil.which("unshare") and not subprocess.run([*UNSHARE, "true"]).returncode


def prompts() -> list[list[int]]:
    """Of a length at which they are lent; the second begins as the first does."""
    rng = random.Random(5)
    first = [rng.randrange(10, VOCAB_SIZE) for _ in range(5000)]
    other = [rng.randrange(10, VOCAB_SIZE) for _ in range(4200)]
    return [first, [*first[:4500], *other[:100]], other]


@pytest.fixture
def lent(monkeypatch) -> list[Loan | None]:
    """What the client lent, as it does."""
    loans: list[Loan | None] = []
    lend = Lender.lend

    def remembered(self: Lender, data: bytes) -> Loan | None:
        loan = lend(self, data)
        loans.append(loan)
        return loan

    monkeypatch.setattr(Lender, "lend", remembered)
    return loans


@asynccontextmanager
async def long_fleet(
    tmp_path: Path, *, num_ranks: int = 2, wrapper: Sequence[str] = ()
) -> AsyncIterator[TinyFleet]:
    longer = {"max_position_embeddings": 8192}
    model = make_tiny_model("llama", tmp_path / "model", overrides=longer)
    async with tiny_fleet(
        model, tmp_path, num_ranks=num_ranks, flags=FLAGS, wrapper=wrapper
    ) as fleet:
        yield fleet


async def answers_of_sent(fleet: TinyFleet) -> list[list[int]]:
    fleet.client._submitter.lends = False
    answers = [(await fleet.generate(prompt, NUM_TOKENS)).ids for prompt in prompts()]
    fleet.client._submitter.lends = True
    await fleet.client.reset_prefix_cache()
    return answers


async def test_a_lent_prompt_is_answered_cached_and_resumed_as_a_sent_one_is(tmp_path, lent):
    async with long_fleet(tmp_path) as fleet:
        expected = await answers_of_sent(fleet)
        assert not lent
        alone = [await fleet.generate(prompt, NUM_TOKENS) for prompt in prompts()]
        assert [tokens.ids for tokens in alone] == expected
        assert [tokens.num_cached for tokens in alone] == [0, 4496, 0]

        running = [fleet.submit(prompt, NUM_TOKENS) for prompt in [*prompts(), *prompts()]]
        parts = [await anext(generation) for generation in running]
        fleet.kill_engine(0)
        rest = await asyncio.gather(*[collect(generation) for generation in running])
        ids = [part.token_ids + tokens.ids for part, tokens in zip(parts, rest, strict=True)]
        assert ids == expected * 2
        assert len(lent) > 9, "none was submitted again"
        assert all(lent)
        stats = await fleet.client.stats()
        assert "unread" not in stats["finished"]
        assert stats["requests"] == 0


@pytest.mark.skipif(not CAN_UNSHARE, reason="needs unshare of util-linux, and the right to it")
async def test_an_engine_that_sees_no_other_process_is_sent_what_it_was_lent(tmp_path, lent):
    """A container of its own, with the coordinator's socket in it."""
    async with long_fleet(tmp_path, num_ranks=1, wrapper=UNSHARE) as fleet:
        [prompt, other, _] = prompts()
        answers = await asyncio.gather(
            *[fleet.generate(tokens, NUM_TOKENS) for tokens in (prompt, other)]
        )
        num_lent = len(lent)
        assert 0 < num_lent <= 2
        again = [await fleet.generate(tokens, NUM_TOKENS) for tokens in (prompt, other)]
        assert [tokens.ids for tokens in again] == [tokens.ids for tokens in answers]
        assert len(lent) == num_lent
        stats = await fleet.client.stats()
        assert stats["finished"] == {"length": 4, "unread": num_lent}
