"""What a frontend says of itself and of the fleet."""

from __future__ import annotations

import asyncio
import os
import struct
from importlib.metadata import version
from typing import Any

from homing.errors import Unavailable
from homing.frontend.service import ServedModel, Service
from homing.params import SamplingParams
from homing.wire import FleetState

HEALTH_TIMEOUT_S = 20.0
"""For the one token of a deep health check, which waits for its turn as others do."""


def health(service: Service) -> dict[str, Any]:
    """`status` is "ok" while some rank serves, else it says why none does.

    `pid` tells frontends that share a port apart.
    """
    fleet = service.client.fleet
    return {
        "status": service.unavailable or "ok",
        "pid": os.getpid(),
        "model": service.model_name,
        "state": fleet.state.value,
        "live_ranks": fleet.live_ranks,
        "ranks": [{"rank": r.rank, "live": r.live, "state": r.state.value} for r in fleet.ranks],
        "lost_ranks": [r.rank for r in fleet.ranks if not r.live],
    }


async def generate_for_health(service: Service) -> dict[str, Any]:
    """`health`, after a token was generated. While the fleet is paused nothing is tried: it is as
    it was told to be. Raises what the generation raises."""
    model, fleet = service.model, service.client.fleet
    if fleet.state is FleetState.RUNNING:
        prompt = struct.pack("<I", model.tokenizer.bos_token_id or 0)
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=1)
        generation = service.client.submit(prompt, params)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                async for _ in generation:
                    pass
        except TimeoutError:
            raise Unavailable(f"no token came in {HEALTH_TIMEOUT_S:g} s") from None
        finally:
            generation.cancel()
    return health(service)


def model_entry(model: ServedModel, name: str) -> dict[str, Any]:
    """An entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": model.since,
        "owned_by": "homing",
        "root": model.card.name,
        "parent": None,
        "max_model_len": model.card.max_context_tokens,
    }


def server_info(service: Service) -> dict[str, Any]:
    """What is served, by whom, and in which state."""
    model, fleet = service.model, service.client.fleet
    return {
        "version": version("homing"),
        "pid": os.getpid(),
        "model": model_entry(model, model.names[0]),
        "names": list(model.names),
        "vocab_size": model.card.vocab_size,
        "eos_token_ids": list(model.card.eos_token_ids),
        "block_size": model.card.block_size,
        "dtype": model.card.dtype,
        "tool_call_parser": model.answer_format.tools,
        "reasoning_parser": model.answer_format.reasoning,
        "routing_policy": fleet.policy,
        "state": fleet.state.value,
        "weight_version": fleet.epoch,
        "live_ranks": fleet.live_ranks,
    }


def load(snapshot: dict[str, Any]) -> dict[str, Any]:
    """How busy the fleet is. `server_load`, vLLM's name: requests dispatched and not finished."""
    ranks = [row for row in snapshot["ranks"] if row["live"]]
    return {
        "server_load": sum(row["load"] for row in ranks),
        "ranks": [{name: row[name] for name in _LOADS} for row in ranks],
    }


_LOADS = (
    "rank",
    "load",
    "running",
    "waiting",
    "owed_tokens",
    "kv_used_blocks",
    "kv_total_blocks",
)
