"""Weight updates again and again, under load: no request hangs, no token is lost or repeated, and
each is the token that the weights of its epoch give.

HOMING_TEST_CYCLES=50 runs the long form.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
import torch

from homing.wire import InFlightKV, UpdateWeights, WeightSource
from tests.support.backends import Oracle
from tests.support.tiny_families import VOCAB_SIZE
from tests.support.tiny_fleet import TinyFleet, Tokens, tiny_fleet
from tests.support.tiny_models import make_tiny_model

CYCLES = int(os.environ.get("HOMING_TEST_CYCLES", "6"))
NUM_RANKS = 4 if CYCLES >= 50 else 2
NUM_SUBMITTERS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_tiny_model("llama", tmp_path_factory.mktemp("models") / f"tiny-{seed}", seed=seed)
        for seed in range(3)
    ]


def model_of(epoch: int, models: list[Path]) -> Path:
    return models[epoch % len(models)]


async def arrivals(
    fleet: TinyFleet, number: int, stop: asyncio.Event
) -> list[tuple[list[int], int, Tokens]]:
    """(prompt, tokens asked for, what came), one request after the other."""
    noise = random.Random(number)
    shared = [noise.randrange(8, VOCAB_SIZE) for _ in range(24)]
    answered: list[tuple[list[int], int, Tokens]] = []
    while not stop.is_set():
        prompt = shared + [noise.randrange(8, VOCAB_SIZE) for _ in range(noise.randrange(1, 40))]
        num_tokens = noise.randrange(1, 60)
        answered.append((prompt, num_tokens, await fleet.generate(prompt, num_tokens)))
    return answered


async def cycle(fleet: TinyFleet, epoch: int, models: list[Path]) -> None:
    """Update with requests in flight, or between a pause and an unpause, or amid a suspension."""
    client = fleet.client
    update = UpdateWeights(
        source=WeightSource.DIRECTORY,
        path=str(model_of(epoch, models)),
        in_flight=InFlightKV.RECOMPUTE,
    )
    if epoch % 3 == 0:
        await client.update_weights(update)
        return
    await client.pause("wait" if epoch % 4 == 0 else "keep")
    if epoch % 3 == 1:
        await client.suspend("discard" if epoch % 2 else "offload", "offload")
    await client.update_weights(update)
    if epoch % 3 == 1:
        await client.resume()
    await client.unpause()


def check_tokens(
    oracles: list[Oracle], prompt: list[int], num_tokens: int, tokens: Tokens
) -> set[int]:
    """Every token is its epoch's weights' choice after all before it. Returns the epochs."""
    assert len(tokens.ids) == num_tokens == len(tokens.epochs)
    assert tokens.epochs == sorted(tokens.epochs)
    for epoch in set(tokens.epochs):
        logits = oracles[epoch % len(oracles)].logits([*prompt, *tokens.ids])
        choices = torch.argmax(logits[len(prompt) - 1 : -1], -1).tolist()
        for choice, token, its_epoch in zip(choices, tokens.ids, tokens.epochs, strict=True):
            assert its_epoch != epoch or choice == token
    return set(tokens.epochs)


@pytest.mark.timeout(120 + 20 * CYCLES)
async def test_updates_under_load_give_every_token_its_epochs_weights(
    models: list[Path], tmp_path: Path
) -> None:
    flags = ("--dtype", "fp32")
    async with tiny_fleet(models[0], tmp_path, num_ranks=NUM_RANKS, flags=flags) as fleet:
        stop = asyncio.Event()
        loads = [asyncio.create_task(arrivals(fleet, n, stop)) for n in range(NUM_SUBMITTERS)]
        for epoch in range(1, CYCLES + 1):
            await cycle(fleet, epoch, models)
            assert fleet.client.fleet.epoch == epoch
        stop.set()
        answered = [answer for answers in await asyncio.gather(*loads) for answer in answers]
        stats = await fleet.client.stats()
    assert stats["requests"] == 0
    assert stats["lost_requests"] == 0
    oracles = [Oracle(model) for model in models]
    seen = [check_tokens(oracles, *answer) for answer in answered]
    assert set().union(*seen) >= set(range(1, CYCLES))
    assert any(len(epochs) > 1 for epochs in seen), "no request was in flight at an update"
