"""What a frontend says of itself and of the fleet."""

from __future__ import annotations

import asyncio
import os
import struct
from importlib.metadata import version
from typing import Any

from msgspec import Struct

from homing.errors import Unavailable
from homing.frontend.service import ServedModel, Service
from homing.params import SamplingParams
from homing.wire import FleetState

HEALTH_TIMEOUT_S = 20.0
"""For the one token of a deep health check, which waits for its turn as others do."""


class Rank(Struct):
    rank: int
    live: bool
    state: str


class Health(Struct, kw_only=True):
    status: str
    """"ok" while some rank serves, else why none does."""
    pid: int
    """Tells frontends that share a port apart."""
    model: str | None
    state: str
    live_ranks: int
    ranks: list[Rank]
    lost_ranks: list[int]


def health(service: Service) -> Health:
    fleet = service.client.fleet
    return Health(
        status=service.unavailable or "ok",
        pid=os.getpid(),
        model=service.model_name,
        state=fleet.state.value,
        live_ranks=fleet.live_ranks,
        ranks=[Rank(r.rank, r.live, r.state.value) for r in fleet.ranks],
        lost_ranks=[r.rank for r in fleet.ranks if not r.live],
    )


async def generate_for_health(service: Service) -> Health:
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


class ModelEntry(Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "homing"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Struct):
    data: list[ModelEntry]
    object: str = "list"


def model_entry(model: ServedModel, name: str) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=model.since,
        root=model.card.name,
        max_model_len=model.card.max_context_tokens,
    )


def model_list(model: ServedModel) -> ModelList:
    return ModelList([model_entry(model, name) for name in model.names])


class Version(Struct):
    version: str = version("homing")


class ServerInfo(Struct, kw_only=True):
    """What is served, by whom, and in which state."""

    version: str
    pid: int
    model: ModelEntry
    names: list[str]
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    dtype: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    routing_policy: str
    state: str
    weight_version: int
    live_ranks: int


def server_info(service: Service) -> ServerInfo:
    model, fleet = service.model, service.client.fleet
    return ServerInfo(
        version=Version().version,
        pid=os.getpid(),
        model=model_entry(model, model.names[0]),
        names=list(model.names),
        vocab_size=model.card.vocab_size,
        eos_token_ids=list(model.card.eos_token_ids),
        block_size=model.card.block_size,
        dtype=model.card.dtype,
        tool_call_parser=model.answer_format.tools,
        reasoning_parser=model.answer_format.reasoning,
        routing_policy=fleet.policy,
        state=fleet.state.value,
        weight_version=fleet.epoch,
        live_ranks=fleet.live_ranks,
    )


class RankLoad(Struct):
    """Of a rank that lives."""

    rank: int
    load: int
    """Requests dispatched and not finished."""
    running: int
    waiting: int
    owed_tokens: int
    kv_used_blocks: int
    kv_total_blocks: int


class Load(Struct):
    server_load: int
    """vLLM's name for the load of all ranks."""
    ranks: list[RankLoad]


def load(snapshot: dict[str, Any]) -> Load:
    """`snapshot`: the coordinator's."""
    live = [row for row in snapshot["ranks"] if row["live"]]
    ranks = [RankLoad(*(row[name] for name in RankLoad.__struct_fields__)) for row in live]
    return Load(sum(rank.load for rank in ranks), ranks)
