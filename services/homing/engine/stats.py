"""What an engine tells of itself: totals since it was made, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

QUEUE_TIMES_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
"""Bounds of the buckets for waiting times."""


@dataclass(slots=True)
class EngineCounters:
    """Totals; none of them ever falls."""

    requests_started: int = 0
    requests_finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache when their request was first admitted."""
    prefilled_tokens: int = 0
    """Tokens computed in prefill chunks, those computed again after a preemption included."""
    prefilled_pairs: int = 0
    """Those tokens, each times the tokens before it."""
    decode_rows: int = 0
    """Requests in steps that computed one token after their prompt."""
    decode_context_tokens: int = 0
    """The sum of what those attended to."""
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_step_s: float = 0.0
    """Time of steps with a prefill chunk."""
    decode_step_s: float = 0.0
    """Time of steps without one."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Right now."""

    running: int
    waiting: int
    owed_tokens: int
    """Tokens of running and waiting requests that are known, yet to be computed."""
    kv_used_blocks: int
    """Held by requests; what is only cached can be had at once."""
    kv_total_blocks: int
