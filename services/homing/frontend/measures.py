"""What a frontend measures of its requests. The coordinator adds it up over all frontends."""

from __future__ import annotations

import time
from collections.abc import Callable

from homing.client import Part
from homing.frontend.openai.schemas import Usage
from homing.observe import Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Measures:
    """Histograms since the process started. Names end as those of vLLM do."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.ttft = Histogram("time_to_first_token_seconds", _SECONDS)
        self.inter_token = Histogram("inter_token_latency_seconds", _TOKEN_SECONDS)
        self.duration = Histogram("e2e_request_latency_seconds", _SECONDS)
        self.prompt_tokens = Histogram("request_prompt_tokens", _TOKENS)
        self.cached_tokens = Histogram("request_cached_tokens", _TOKENS)
        self.generated_tokens = Histogram("request_generation_tokens", _TOKENS)

    def counters(self) -> dict[str, float]:
        histograms = (
            self.ttft,
            self.inter_token,
            self.duration,
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
        )
        return {name: n for each in histograms for name, n in each.counters().items()}


class Stopwatch:
    """One HTTP request's times, from its arrival on."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._started_at = measures.now()
        self._last_token_at: dict[int, float] = {}  # choice -> time

    def part(self, index: int, part: Part) -> None:
        """Choice `index` got a part. Tokens of one part count as evenly spread since the last."""
        if not part.token_ids:
            return
        now = self._measures.now()
        last = self._last_token_at.get(index)
        if last is None:
            self._measures.ttft.observe(now - self._started_at)
        else:
            count = len(part.token_ids)
            self._measures.inter_token.observe((now - last) / count, count)
        self._last_token_at[index] = now

    def finish(self, usage: Usage) -> None:
        """All choices have ended."""
        measures = self._measures
        measures.duration.observe(measures.now() - self._started_at)
        measures.prompt_tokens.observe(usage.prompt_tokens)
        measures.cached_tokens.observe(usage.prompt_tokens_details.cached_tokens)
        measures.generated_tokens.observe(usage.completion_tokens)
