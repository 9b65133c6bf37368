"""What StatsReply says: the fleet as the coordinator sees it, as plain maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homing.coordinator.loads import RankLoads
from homing.coordinator.peers import Peers
from homing.coordinator.records import Engine, PeerState, RankId
from homing.coordinator.totals import ReportedCounters, Totals
from homing.wire import Heartbeat

_NO_REPORT = Heartbeat(0)


def fleet_snapshot(
    peers: Peers,
    loads: RankLoads,
    totals: Totals,
    counters: ReportedCounters,
    circuit_of: Callable[[RankId], str],
) -> dict[str, Any]:
    """Ranks that are gone keep a row; counters never fall while the coordinator lives."""
    return {
        "live_ranks": loads.num_open,
        "ranks": [
            _rank_row(engine, loads, totals, counters)
            | {"circuit": circuit_of(engine.rank), "leaving": engine.leaving}
            for _, engine in sorted(peers.last_engine_of_rank.items())
        ],
        "clients": len(peers.client_of_uid),
        "requests": sum(len(client.requests) for client in peers.clients),
        "totals": counters.totals(),
        "submitted": totals.submitted,
        "resubmissions": totals.resubmissions,
        "dispatched": sum(totals.dispatched_to_rank.values()),
        "duplicates": totals.duplicates,
        "superseded": totals.superseded,
        "refused": dict(totals.refused),
        "finished": dict(totals.finished),
        "lost_requests": totals.lost_requests,
        "orphaned_requests": totals.orphaned_requests,
        "stale_finishes": totals.stale_finishes,
        "outputs": totals.outputs,
        "outputs_dropped": totals.outputs_dropped,
        "lost_ranks": totals.lost_ranks,
        "lost_clients": totals.lost_clients,
        "garbage": totals.garbage,
        "predicted_cached_tokens": totals.predicted_cached_tokens,
        "actual_cached_tokens": totals.actual_cached_tokens,
        "mispredicted_cached_tokens": totals.mispredicted_cached_tokens,
        "kv_stored": totals.kv_stored,
        "kv_dropped": totals.kv_dropped,
        "generated_tokens": totals.generated_tokens,
    }


def _rank_row(
    engine: Engine, loads: RankLoads, totals: Totals, counters: ReportedCounters
) -> dict[str, Any]:
    live = engine.state is PeerState.LIVE
    report = engine.report if live and engine.report else _NO_REPORT
    return {
        "rank": engine.rank,
        "live": live,
        "state": engine.fleet_state.value,
        "load": loads.load(engine.slot) if live else 0,
        "dispatched": totals.dispatched_to_rank[engine.rank],
        "running": report.running,
        "waiting": report.waiting,
        "owed_tokens": report.owed_tokens,
        "kv_used_blocks": report.kv_used_blocks,
        "kv_total_blocks": report.kv_total_blocks,
        "counters": counters.of(engine.uid),
    }
