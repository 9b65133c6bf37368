"""Updates from a trainer that has the weights in shards on several ranks of its own."""

from __future__ import annotations

import asyncio
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from homing.errors import CommandFailed
from homing.wire import UpdateWeights
from tests.support.backends import Oracle
from tests.support.sharded_trainer import sharded_trainer
from tests.support.tiny_fleet import TinyFleet, tiny_fleet
from tests.support.tiny_models import make_tiny_model

PROMPT = list(range(20, 60))
FP32 = ("--dtype", "fp32")
HEAD = "lm_head.weight"


async def update_from(
    fleet: TinyFleet, trainer: list[Connection], names: list[str] | None = None
) -> dict[int, dict[str, Any]]:
    for pipe in trainer:
        pipe.send(("broadcast", names))
    update = await asyncio.to_thread(trainer[0].recv)
    assert isinstance(update, UpdateWeights)
    try:
        return await fleet.client.update_weights(update)
    finally:
        trainer[0].send("taken")
        assert await asyncio.to_thread(trainer[0].recv) == "over"


def with_stepped_head(model: Path, directory: Path) -> Path:
    """What the trainer's step makes of that one parameter; all others as they are in `model`."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {HEAD: tensors[HEAD] * -1.5}, directory / "model.safetensors")
    return directory


@pytest.mark.timeout(180)
async def test_shards_of_a_trainer_are_gathered_and_reach_every_engine_whole(
    tmp_path: Path,
) -> None:
    """The trainer is FSDP2 on two processes. It updates all weights, steps its shards in place,
    updates one parameter, and dies in the middle of a third update."""
    old, new = (make_tiny_model("llama", tmp_path / f"tiny-{n}", seed=n) for n in range(2))
    expected = Oracle(new).greedy(PROMPT, 16)
    with sharded_trainer(new, tmp_path) as trainer:
        async with tiny_fleet(old, tmp_path, num_ranks=2, flags=FP32) as fleet:
            assert (await fleet.generate(PROMPT, 16)).ids == Oracle(old).greedy(PROMPT, 16)
            results = await update_from(fleet, trainer)
            num_tensors = len(load_file(new / "model.safetensors"))
            assert [r["num_parameters"] for r in results.values()] == [num_tensors] * 2

            for pipe in trainer:
                pipe.send(("step", None))
            answers = await asyncio.gather(*(fleet.generate(PROMPT, 16) for _ in range(4)))
            assert all(answer.ids == expected for answer in answers)
            assert all(answer.epochs == [1] * 16 for answer in answers)

            results = await update_from(fleet, trainer, [HEAD])
            assert [r["num_parameters"] for r in results.values()] == [1] * 2
            partial = Oracle(with_stepped_head(new, tmp_path / "partial")).greedy(PROMPT, 16)
            assert partial != expected
            assert (await fleet.generate(PROMPT, 16)).ids == partial

            for pipe in trainer:
                pipe.send(("die", None))
            update = await asyncio.to_thread(trainer[0].recv)
            with pytest.raises(CommandFailed):
                await fleet.client.update_weights(update)
            again = await fleet.generate(PROMPT, 16)
            assert again.ids == partial
            assert again.epochs == [2] * 16
