"""/metrics: the coordinator's snapshot of the fleet, as Prometheus reads it.

It holds what engines and frontends count, added up: every frontend gives the same totals, and they
never fall while the coordinator lives. Names end as those of vLLM do where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from homing.observe import read_histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Metric -> (key in the snapshot, help).
_COUNTERS = {
    "requests_submitted": ("submitted", "Submissions to the coordinator, resubmissions included"),
    "requests_resubmitted": ("resubmissions", "Submissions after an engine was lost"),
    "requests_lost": ("lost_requests", "Attempts that ended because their engine was lost"),
    "ranks_lost": ("lost_ranks", "Engine ranks that died or left"),
    "prefix_cache_predicted_tokens": (
        "predicted_cached_tokens",
        "Prompt tokens of finished requests that the coordinator took to be cached at their rank",
    ),
    "prefix_cache_actual_tokens": (
        "actual_cached_tokens",
        "Prompt tokens of finished requests that were cached at their rank",
    ),
    "prefix_cache_mispredicted_tokens": (
        "mispredicted_cached_tokens",
        "Difference of the two, request by request, whichever is more",
    ),
    "garbage_messages": ("garbage", "Messages to the coordinator that were none"),
}
# Metric -> (key in the snapshot's totals of engine counters, help).
_ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens taken in"),
    "generation_tokens": ("generated_tokens", "Tokens generated"),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache"),
    "prefill_tokens": ("prefilled_tokens", "Tokens computed in prefill"),
    "num_preemptions": ("preemptions", "Requests set back for lack of KV blocks"),
    "engine_steps": ("steps", "Steps run"),
}
# Metric -> (key in a rank's row, help).
_RANK_GAUGES = {
    "num_requests_running": ("running", "Requests in the batch"),
    "num_requests_waiting": ("waiting", "Requests not yet in the batch"),
    "requests_in_flight": ("load", "Requests dispatched and not finished"),
    "owed_tokens": ("owed_tokens", "Prompt tokens yet to prefill"),
}


_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to each choice's first token",
    "inter_token_latency_seconds": "From one token of a choice to the next",
    "e2e_request_latency_seconds": "From a request's arrival to its end",
    "request_queue_time_seconds": "From a request's arrival at an engine to its first step",
    "request_prompt_tokens": "Prompt tokens of a request",
    "request_cached_tokens": "Prompt tokens of a request that were found in the prefix cache",
    "request_generation_tokens": "Tokens generated for a request, all choices together",
}


def render_metrics(snapshot: dict[str, Any]) -> bytes:
    """The exposition text of a coordinator's snapshot."""
    return generate_latest(_Snapshot(snapshot))  # pyright: ignore[reportArgumentType]


class _Snapshot(Collector):
    """Stands in for a registry, of which only `collect` is used."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot
        yield GaugeMetricFamily("homing_live_ranks", "Ranks that serve", snapshot["live_ranks"])
        yield from _counters(_COUNTERS, snapshot)
        yield from _counters(_ENGINE_COUNTERS, snapshot["totals"])
        yield _labelled(
            "homing_request_success", "Finished requests", "finished_reason", snapshot["finished"]
        )
        yield _labelled("homing_requests_refused", "Refused", "reason", snapshot["refused"])
        yield from _rank_metrics(snapshot["ranks"])
        for name, text in _HISTOGRAMS.items():
            buckets, total = read_histogram(name, snapshot["totals"])
            yield HistogramMetricFamily(f"homing_{name}", text, buckets, total)


def _counters(
    metrics: dict[str, tuple[str, str]], values: dict[str, int | float]
) -> Iterable[Metric]:
    for name, (key, text) in metrics.items():
        yield CounterMetricFamily(f"homing_{name}", text, values.get(key, 0))


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    metric = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        metric.add_metric([value], count)
    return metric


def _rank_metrics(rows: list[dict[str, Any]]) -> Iterable[Metric]:
    for name, (key, text) in _RANK_GAUGES.items():
        metric = GaugeMetricFamily(f"homing_{name}", text, labels=["rank"])
        for row in rows:
            metric.add_metric([str(row["rank"])], row[key])
        yield metric
    usage = GaugeMetricFamily("homing_kv_cache_usage_perc", "1 is full", labels=["rank"])
    up = GaugeMetricFamily("homing_rank_up", "1 while the rank is live", labels=["rank"])
    for row in rows:
        used, total = row["kv_used_blocks"], row["kv_total_blocks"]
        usage.add_metric([str(row["rank"])], used / total if total else 0.0)
        up.add_metric([str(row["rank"])], int(row["live"]))
    yield usage
    yield up
    dispatched = CounterMetricFamily(
        "homing_requests_dispatched", "Submissions sent to the rank", labels=["rank"]
    )
    for row in rows:
        dispatched.add_metric([str(row["rank"])], row["dispatched"])
    yield dispatched
