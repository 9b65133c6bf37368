"""What `homing top` shows: two samples of a fleet become a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 10


@dataclass(frozen=True)
class RankRow:
    rank: int
    state: str
    load: int
    running: int
    waiting: int
    kv_share: float
    hit_share: float
    """Of the prompt tokens since the start, how many were found in the cache."""
    tokens_s: float


@dataclass(frozen=True)
class Sample:
    """The fleet at one time, as the coordinator's snapshot or a frontend's /fleet has it."""

    at: float
    """Seconds, by any clock."""
    fleet: Mapping[str, Any]

    def rows(self, earlier: Sample | None) -> list[RankRow]:
        """The ranks; how fast they are is told by what they were at before."""
        before = {row["rank"]: row for row in earlier.fleet["ranks"]} if earlier else {}
        seconds = self.at - earlier.at if earlier else 0.0
        return [_row(row, before.get(row["rank"]), seconds) for row in self.fleet["ranks"]]


def _row(row: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> RankRow:
    generated = _counter(row, "generated_tokens")
    grown = generated - _counter(before, "generated_tokens") if before else 0
    prompt, total = _counter(row, "prompt_tokens"), row["kv_total_blocks"]
    return RankRow(
        rank=row["rank"],
        state=_state(row),
        load=row["load"],
        running=row["running"],
        waiting=row["waiting"],
        kv_share=row["kv_used_blocks"] / total if total else 0.0,
        hit_share=_counter(row, "cached_tokens") / prompt if prompt else 0.0,
        tokens_s=max(0, grown) / seconds if seconds > 0 else 0.0,
    )


def _counter(row: Mapping[str, Any], name: str) -> float:
    """The snapshot has a rank's counters in a map of their own, /fleet beside the rest."""
    return row.get("counters", row).get(name, 0)


def _state(row: Mapping[str, Any]) -> str:
    if not row["live"]:
        return "gone"
    if row.get("leaving"):
        return "leaving"
    circuit = row.get("circuit", "closed")
    return row["state"] if circuit == "closed" else f"{row['state']}, breaker {circuit}"


def fleet_view(sample: Sample, earlier: Sample | None) -> Group:
    rows = sample.rows(earlier)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("state")
    for name in ("load", "running", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("KV in use")
    for name in ("prefix hits", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.rank),
            Text(row.state, style="" if row.state == "running" else "yellow"),
            *map(str, (row.load, row.running, row.waiting)),
            f"{_bar(row.kv_share)} {row.kv_share:4.0%}",
            f"{row.hit_share:.0%}",
            f"{row.tokens_s:,.1f}",
        )
    return Group(_headline(sample.fleet, rows), Text(), table)


def _headline(fleet: Mapping[str, Any], rows: list[RankRow]) -> Text:
    tokens_s = sum(row.tokens_s for row in rows)
    return Text(
        f"{fleet['state']}, epoch {fleet['epoch']}, {fleet['policy']}: "
        f"{fleet['live_ranks']} of {len(rows)} ranks, {fleet['clients']} clients, "
        f"{fleet['requests']} requests, {tokens_s:,.1f} tokens/s"
    )


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR_WIDTH)
    return "█" * full + "░" * (BAR_WIDTH - full)
