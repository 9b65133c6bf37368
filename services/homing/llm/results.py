"""What a generation gives: a `Result` at its end, a `Delta` after each step of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from homing.errors import HomingError

Alternatives = list[tuple[int, float]]
"""(token id, log-probability) of the most probable tokens at one position, best first."""


class Status(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"  # by its own end or its limit
    ABORTED = "aborted"  # because somebody asked; what was generated until then is there
    FAILED = "failed"  # by `error`


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One request's answer. Log-probabilities are in nats, those of the raw logits."""

    request_id: int
    """Unique in its `LLM`, `AsyncLLM` or `Engine`."""
    prompt: str | None
    """The prompt if it was given as text."""
    num_prompt_tokens: int
    prompt_tokens: list[int] | None
    """With `return_prompt_tokens`."""
    generated_text: str | None
    """None without `detokenize_generations`."""
    generated_tokens: list[int]
    """A stop id that ended the answer is the last of them, though no part of the text."""
    prompt_log_probs: list[float | None] | None
    """With `return_log_probs`, unless skipped; None for the first token, which has none."""
    generated_log_probs: list[float] | None
    """With `return_log_probs`."""
    prompt_top_n_logprobs: list[Alternatives | None] | None
    """With `top_n_logprobs`, where the prompt's log-probabilities are."""
    generated_top_n_logprobs: list[Alternatives] | None
    """With `top_n_logprobs`."""
    finish_reason: str
    """stop, length, abort, or error."""
    stop_reason: int | str | None
    """The token id or the stop word that ended it."""
    num_cached_tokens: int
    """Tokens of the prompt that were found in the KV cache."""
    seed: int
    """Of its noise."""
    token_epochs: list[int]
    """For each generated token, the weight epoch under which it was sampled."""
    ttft: float | None
    """Seconds from submission to the first token; None if there is none."""
    latency: float
    """Seconds from submission to the end."""
    status: Status
    error: HomingError | None = None
    """Why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of one request's answer."""

    request_id: int
    index: int
    """Which of the prompts given it answers."""
    text: str
    """Whole characters; joined, the deltas' are `generated_text`."""
    tokens: list[int]
    log_probs: list[float] | None
    top_n_logprobs: list[Alternatives] | None
    finish_reason: str | None = None
    """On the last delta."""
    result: Result | None = None
    """On the last delta: the whole answer."""


def raise_first_error(results: Iterable[Result]) -> None:
    """Raise what ended the first of them that failed, if any did."""
    for result in results:
        if result.error is not None:
            raise result.error


def raising_errors(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """The deltas, up to one of a request that failed: that raises what ended it."""
    for delta in deltas:
        if delta.result is not None:
            raise_first_error([delta.result])
        yield delta
