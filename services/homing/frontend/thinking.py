"""A budget for thoughts: a model that still thinks after so many tokens is made to stop.

    [0, budget)      generated as always; if the model closed its thoughts, it simply goes on
    the closer       put behind them otherwise
    [.., max_tokens) generated with all that before it, as one answer

The second part resumes the first: its prompt is in the prefix cache, and its noise is what it would
have been.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from homing.client import Generation, Part
from homing.frontend.parsers.reasoning import ReasoningFormat, ReasoningParser
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer
from homing.wire import FinishReason, pack_tokens

Submit = Callable[[bytes, SamplingParams, int], Generation]
"""(packed prompt, parameters, how many of its last ids are resumed) -> generation."""


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """For the answers to one prompt."""

    max_tokens: int
    format: ReasoningFormat
    prompt_end: str
    tokenizer: Tokenizer

    @property
    def closer(self) -> list[int]:
        """What ends the thoughts, as models write it."""
        text = f"\n{self.format.closer}\n\n"
        return self.tokenizer.encode(text, add_special_tokens=False)

    def is_thinking(self, generated: Sequence[int]) -> bool:
        """Whether an answer that begins so is inside its thoughts."""
        parser = ReasoningParser(self.format, prompt_end=self.prompt_end)
        parser.push(self.tokenizer.decode(generated, skip_special_tokens=False))
        return parser.is_reasoning


class ThinkingGeneration:
    """Iterates and cancels as a `Generation` does."""

    def __init__(
        self, submit: Submit, prompt: bytes, params: SamplingParams, limit: ThinkingLimit
    ) -> None:
        """`params` leaves room for limit, closer and more. Raises what `Client.submit` raises."""
        self._submit = submit
        self._prompt = prompt
        self._limit = limit
        first = msgspec.structs.replace(
            params,
            num_tokens_to_generate=limit.max_tokens,
            min_tokens=min(params.min_tokens, limit.max_tokens),
        )
        self._current = submit(prompt, first, 0)
        # The same noise in both parts; the prompt is scored once.
        self._params = msgspec.structs.replace(
            params, seed=self._current.seed, skip_prompt_log_probs=True
        )
        self._parts = self._iterate()

    def __aiter__(self) -> AsyncIterator[Part]:
        return self._parts

    def cancel(self) -> None:
        self._current.cancel()

    async def _iterate(self) -> AsyncIterator[Part]:
        generated: list[int] = []
        async for part in self._current:
            generated += part.token_ids
            if part.finish is not None and part.finish.reason is not FinishReason.LENGTH:
                yield part
                return
            yield msgspec.structs.replace(part, finish=None)
        if self._limit.is_thinking(generated):
            closer = self._limit.closer
            yield _forced(closer, self._params)
            generated += closer
        resumed = self._prompt + pack_tokens(generated)
        self._current = self._submit(resumed, self._params, len(generated))
        async for part in self._current:
            yield msgspec.structs.replace(part, num_cached_tokens=None)


def _forced(token_ids: list[int], params: SamplingParams) -> Part:
    """Tokens that were not chosen: their probability was 1."""
    if not params.return_log_probs:
        return Part(token_ids=token_ids)
    top = [[(token, 0.0)] for token in token_ids] if params.top_n_logprobs else None
    return Part(token_ids=token_ids, log_probs=[0.0] * len(token_ids), top=top)
