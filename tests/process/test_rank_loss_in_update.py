"""A rank that dies in the middle of an update, and one prompt shared by a group."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from homing.wire import UpdateWeights, WeightSource
from tests.support.backends import Oracle
from tests.support.tiny_fleet import START_TIMEOUT_S, tiny_fleet
from tests.support.tiny_models import make_tiny_model

PROMPT = list(range(20, 60))
FP32 = ("--dtype", "fp32")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_tiny_model("llama", tmp_path_factory.mktemp("models") / f"tiny-{seed}", seed=seed)
        for seed in range(2)
    ]


async def until(holds: Callable[[], bool]) -> None:
    """Engines start, and messages arrive, as slowly as the machine is busy."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_rank_that_dies_amid_an_update_comes_back_to_the_weights_of_the_others(
    models: list[Path], tmp_path: Path
) -> None:
    """It is stopped before the update, so that it dies when the other one is prepared."""
    async with tiny_fleet(models[0], tmp_path, num_ranks=2, flags=FP32) as fleet:
        running = [asyncio.create_task(fleet.generate([*PROMPT, n], 100)) for n in range(6)]
        os.kill(fleet.pid(1), signal.SIGSTOP)
        updating = asyncio.create_task(fleet.client.update_weights(models[1]))
        await until(lambda: "new weights are prepared" in fleet.log(0))
        assert not updating.done()
        fleet.kill_engine(1)
        results = await updating
        assert results[0]["num_parameters"] > 0
        assert results[1] == {"lost": True}
        for tokens in await asyncio.gather(*running):
            assert len(tokens.ids) == len(tokens.epochs) == 100
            assert tokens.epochs == sorted(tokens.epochs)
        fleet.start_engine(1)
        await fleet.client.wait_for_ranks(2, START_TIMEOUT_S)
        fleet.kill_engine(0)
        tokens = await fleet.generate(PROMPT, 16)
        assert tokens.ids == Oracle(models[1]).greedy(PROMPT, 16)
        assert set(tokens.epochs) == {1}


async def test_a_group_of_samples_prefills_its_prompt_once_on_each_rank_it_uses(
    tmp_path: Path,
) -> None:
    """Every further sample computes a part of the prompt's last block at most."""
    model = make_tiny_model("llama", tmp_path / "m", overrides={"max_position_embeddings": 1024})
    prompt = [8 + n % 300 for n in range(512)]
    flags = (*FP32, "--max-step-tokens", "64")
    async with tiny_fleet(model, tmp_path, num_ranks=2, flags=flags) as fleet:
        await asyncio.gather(
            *(fleet.generate(prompt, 4, temperature=1.0, seed=n) for n in range(16))
        )
        ranks: list[dict[str, float]] = []
        while sum(rank["requests_finished"] for rank in ranks) < 16:
            stats = await fleet.client.stats()
            ranks = [rank["counters"] for rank in stats["ranks"]]
        for rank in ranks:
            if rank["requests_finished"]:
                repeated = rank["requests_finished"] - 1
                assert 512 <= rank["prefilled_tokens"] <= 512 + repeated * 16
                assert rank["cached_tokens"] >= repeated * 496
                assert rank["prefilled_tokens"] + rank["cached_tokens"] == 512 * (1 + repeated)


async def test_a_rank_without_the_weights_of_a_vanished_file_waits_for_the_next_update(
    models: list[Path], tmp_path: Path
) -> None:
    file = models[1] / "model.safetensors"
    async with tiny_fleet(models[0], tmp_path, num_ranks=1, flags=FP32) as fleet:
        shared = UpdateWeights(source=WeightSource.SHARED_MEMORY, path=str(file))
        await fleet.client.update_weights(shared)
        fleet.start_engine(1)
        await until(lambda: len(fleet.client.fleet.ranks) == 2)
        assert fleet.client.fleet.live_ranks == 1
        await fleet.client.update_weights(models[0])
        await fleet.client.wait_for_ranks(2, START_TIMEOUT_S)
