"""What a frontend says of itself and of the fleet."""

from __future__ import annotations

import os
from typing import Any

from homing.frontend.service import ServedModel, Service


def health(service: Service) -> dict[str, Any]:
    """`status` is "ok" while some rank serves, else it says why none does.

    `pid` tells frontends that share a port apart.
    """
    fleet = service.client.fleet
    return {
        "status": service.unavailable or "ok",
        "pid": os.getpid(),
        "state": fleet.state.value,
        "live_ranks": fleet.live_ranks,
        "ranks": [{"rank": r.rank, "live": r.live, "state": r.state.value} for r in fleet.ranks],
        "lost_ranks": [r.rank for r in fleet.ranks if not r.live],
    }


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
