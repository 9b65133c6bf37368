"""GET /fleet: the coordinator's snapshot, cut down to what people look at.

`recent`, newest first, is where the last requests went and why. Each has `age_s`, `num_blocks` of
its prompt, the `rank` it went to, and for the best ranks in `scores`: `rank`, `matched_blocks`,
`load` and `score`.
"""

from __future__ import annotations

from typing import Any

from homing.client import FleetView

_RANK_KEYS = (
    "rank",
    "live",
    "state",
    "load",
    "running",
    "waiting",
    "owed_tokens",
    "kv_used_blocks",
    "kv_total_blocks",
    "dispatched",
)
_RANK_COUNTERS = ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")
_TOTALS = (*_RANK_COUNTERS, "prefilled_tokens", "requests_finished")
_FLEET_COUNTERS = ("submitted", "resubmissions", "lost_requests", "lost_ranks")


def fleet_json(snapshot: dict[str, Any], fleet: FleetView) -> dict[str, Any]:
    """What the page shows of the fleet now. Counters restart at zero with the coordinator."""
    totals, card = snapshot["totals"], fleet.card
    return {
        "state": fleet.state.value,
        "epoch": fleet.epoch,
        "policy": fleet.policy,
        "model": card and {"name": card.name, "max_context_tokens": card.max_context_tokens},
        "live_ranks": snapshot["live_ranks"],
        "requests": snapshot["requests"],
        "clients": snapshot["clients"],
        "ranks": [_rank(row) for row in snapshot["ranks"]],
        "totals": {
            **{key: totals.get(key, 0) for key in _TOTALS},
            **{key: snapshot[key] for key in _FLEET_COUNTERS},
            "refused": sum(snapshot["refused"].values()),
        },
        "ttft": _ttft(totals),
        "recent": snapshot["recent"],
    }


def _rank(row: dict[str, Any]) -> dict[str, Any]:
    counters = row["counters"]
    return {
        **{key: row[key] for key in _RANK_KEYS},
        **{key: counters.get(key, 0) for key in _RANK_COUNTERS},
        "leaving": row.get("leaving", False),
        "circuit": row.get("circuit", "closed"),
    }


def _ttft(totals: dict[str, Any]) -> dict[str, Any] | None:
    """Sum and number of the times to first token; None before there was one."""
    name = "time_to_first_token_seconds"
    if not totals.get(f"{name}.count"):
        return None
    return {"count": totals[f"{name}.count"], "sum_s": totals[f"{name}.sum"]}
