"""What ranks tell of their caches makes the coordinator's guess right where caches are small."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.process_fleet import CACHE_GB
from tests.support.tiny_fleet import TinyFleet, tiny_fleet
from tests.support.tiny_models import make_tiny_model

NUM_PROMPTS, NUM_BLOCKS, BLOCK_SIZE = 10, 12, 16
SMALL = ("--kv-cache-gb", str(CACHE_GB), "--dtype", "fp32", "--max-model-len", "256")
"""A cache of 63 blocks, of the 120 that the prompts have."""

pytestmark = pytest.mark.timeout(120)


async def stats_when(fleet: TinyFleet, name: str, value: int) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (stats := await fleet.client.stats())[name] != value:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.05)
    return stats


async def stats_after_two_rounds(
    model: Path, directory: Path, *flags: str, num_told: int
) -> dict[str, Any]:
    """Each prompt once, then once more, the latest first: of these the cache holds some."""
    directory.mkdir()
    prompts = [[10 + n] * (NUM_BLOCKS * BLOCK_SIZE + 1) for n in range(NUM_PROMPTS)]
    async with tiny_fleet(model, directory, num_ranks=1, flags=(*SMALL, *flags)) as fleet:
        for prompt in prompts:
            await fleet.generate(prompt, 1)
        await stats_when(fleet, "kv_stored", num_told)
        for prompt in reversed(prompts):
            await fleet.generate(prompt, 1)
        return await stats_when(fleet, "requests", 0)


async def test_with_events_what_is_predicted_to_be_cached_is(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    guessed, told = await asyncio.gather(
        stats_after_two_rounds(model, tmp_path / "guessed", num_told=0),
        stats_after_two_rounds(
            model, tmp_path / "told", "--kv-events", num_told=NUM_PROMPTS * NUM_BLOCKS
        ),
    )
    prompt_tokens = NUM_PROMPTS * NUM_BLOCKS * BLOCK_SIZE
    assert guessed["predicted_cached_tokens"] == prompt_tokens, "once sent, for ever believed"
    actual = guessed["actual_cached_tokens"]
    assert 0 < actual < 0.6 * prompt_tokens
    assert guessed["mispredicted_cached_tokens"] == prompt_tokens - actual
    assert told["actual_cached_tokens"] == actual
    assert told["predicted_cached_tokens"] == actual
    assert told["mispredicted_cached_tokens"] == 0
    assert told["kv_dropped"] > 0
