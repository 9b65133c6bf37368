"""What one step computes: the scheduler's decision, before any tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from homing.engine.request import Phase, Request


class Chunk(NamedTuple):
    """Tokens `[start, end)` of one request, computed in this step."""

    request: Request
    start: int
    end: int
    scored: range
    """Positions whose logits score a token of the prompt."""
    samples: bool
    """The logits of position `end - 1` choose the next token."""

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens that the request owes."""
        start, end = request.num_computed, request.num_computed + num_tokens
        scored = request.prompt_scores.positions(start, end) if request.scores_prompt else range(0)
        return cls(request, start, end, scored, end == request.num_tokens and request.generates)


class StepLoad(NamedTuple):
    """What a step computes, in the terms that say how long it takes."""

    prefill_tokens: int
    prefill_pairs: int
    """The prefill tokens, each times the tokens before it."""
    decode_rows: int
    decode_context_tokens: int
    """The sum of what the decodes attend to."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks in the order of their rows."""

    chunks: list[Chunk] = field(default_factory=list)

    @property
    def load(self) -> StepLoad:
        tokens = pairs = rows = context = 0
        for chunk in self.chunks:
            if chunk.request.phase is Phase.PREFILL:
                tokens += chunk.end - chunk.start
                pairs += (chunk.end * chunk.end - chunk.start * chunk.start) // 2
            else:
                rows += 1
                context += chunk.end
        return StepLoad(tokens, pairs, rows, context)
