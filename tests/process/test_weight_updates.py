"""New weights for a fleet of real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from homing.errors import CommandFailed, NotAllowed
from homing.llm.weight_group import broadcast_weights
from homing.wire import FleetState, UpdateWeights, WeightSource
from tests.support.backends import Oracle
from tests.support.tiny_fleet import START_TIMEOUT_S, TinyFleet, collect, tiny_fleet
from tests.support.tiny_models import make_tiny_model

PROMPT = list(range(20, 60))
FP32 = ("--dtype", "fp32")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture, other weights."""
    return [
        make_tiny_model("llama", tmp_path_factory.mktemp("models") / f"tiny-{seed}", seed=seed)
        for seed in range(3)
    ]


async def ranks_of(fleet: TinyFleet, num_ranks: int) -> None:
    await fleet.client.wait_for_ranks(num_ranks, START_TIMEOUT_S)


async def test_an_update_reaches_every_rank_and_no_old_prefix_is_found(
    models: list[Path], tmp_path: Path
) -> None:
    async with tiny_fleet(models[0], tmp_path, num_ranks=2, flags=FP32) as fleet:
        old, new = (Oracle(model).greedy(PROMPT, 16) for model in models[:2])
        await fleet.generate(PROMPT, 16)
        before = await fleet.generate(PROMPT, 16)
        assert before.num_cached == 32
        assert before.ids == old
        results = await fleet.client.update_weights(models[1])
        assert set(results) == {0, 1}
        assert all(result["num_parameters"] > 0 for result in results.values())
        after = await asyncio.gather(*(fleet.generate(PROMPT, 16) for _ in range(6)))
        assert all(tokens.ids == new for tokens in after)
        assert all(tokens.epochs == [1] * 16 for tokens in after)
        assert sum(tokens.num_cached == 0 for tokens in after) >= 1
        assert fleet.client.fleet.epoch == 1

        torn = tmp_path / "torn"
        torn.mkdir()
        whole = (models[2] / "model.safetensors").read_bytes()
        (torn / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CommandFailed, match=r"rank 0.*not a safetensors file"):
            await fleet.client.update_weights(torn)
        with pytest.raises(CommandFailed, match="neither a directory nor a file"):
            await fleet.client.update_weights(tmp_path / "nowhere")
        assert (await fleet.generate(PROMPT, 16)).ids == new

        stale = UpdateWeights(source=WeightSource.DIRECTORY, path=str(models[2]), epoch=1)
        with pytest.raises(NotAllowed, match="only increase"):
            await fleet.client.update_weights(stale)
        await fleet.client.pause()
        await fleet.client.suspend("discard", "offload")
        await fleet.client.update_weights(models[2])
        await fleet.client.resume()
        await fleet.client.unpause()
        assert fleet.client.fleet.state is FleetState.RUNNING
        newest = await fleet.generate(PROMPT, 16)
        assert newest.ids == Oracle(models[2]).greedy(PROMPT, 16)
        assert newest.epochs == [2] * 16


async def test_a_rank_that_starts_later_loads_what_the_others_were_updated_from(
    models: list[Path], tmp_path: Path
) -> None:
    async with tiny_fleet(models[0], tmp_path, num_ranks=1, flags=FP32) as fleet:
        await fleet.client.update_weights(models[1])
        fleet.start_engine(1)
        await ranks_of(fleet, 2)
        fleet.kill_engine(0)
        tokens = await fleet.generate(PROMPT, 16)
        assert tokens.ids == Oracle(models[1]).greedy(PROMPT, 16)
        assert tokens.epochs == [1] * 16


async def test_requests_in_flight_get_each_token_once_and_its_epoch(
    models: list[Path], tmp_path: Path
) -> None:
    async with tiny_fleet(models[0], tmp_path, num_ranks=2, flags=FP32) as fleet:
        running = [fleet.submit([*PROMPT, number], 150) for number in range(8)]
        collecting = [asyncio.create_task(collect(generation)) for generation in running]
        await fleet.client.update_weights(models[1])
        for tokens in await asyncio.gather(*collecting):
            assert len(tokens.ids) == 150
            assert tokens.epochs == sorted(tokens.epochs)
            assert set(tokens.epochs) <= {0, 1}


async def test_a_trainer_in_a_process_group_broadcasts_to_every_rank(
    models: list[Path], tmp_path: Path
) -> None:
    async with tiny_fleet(models[0], tmp_path, num_ranks=2, flags=FP32) as fleet:
        tensors = load_file(models[1] / "model.safetensors")
        with broadcast_weights(tensors.items(), ranks=[0, 1]) as update:
            results = await fleet.client.update_weights(update)
        assert [r["num_parameters"] for r in results.values()] == [len(tensors)] * 2
        for tensor in tensors.values():  # the trainer goes on, in place
            tensor.fill_(0.5)
        assert (await fleet.generate(PROMPT, 16)).ids == Oracle(models[1]).greedy(PROMPT, 16)

        del tensors["model.norm.weight"]
        with (
            broadcast_weights(tensors.items(), ranks=[0, 1]) as update,
            pytest.raises(CommandFailed, match=r"model\.norm\.weight"),
        ):
            await fleet.client.update_weights(update)
        tensors = load_file(models[2] / "model.safetensors")
        with (
            broadcast_weights(tensors.items(), ranks=[0], timeout_s=5) as update,
            pytest.raises(CommandFailed, match="no place for rank 1"),
        ):
            await fleet.client.update_weights(update)
        assert (await fleet.generate(PROMPT, 16)).ids == Oracle(models[1]).greedy(PROMPT, 16)
