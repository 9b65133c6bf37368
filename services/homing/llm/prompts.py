"""The forms in which prompts may be given, and the checks that they and their parameters pass
before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from homing import params
from homing.errors import ContextLengthExceeded, InvalidRequest
from homing.llm.params import SamplingParams

TokenIds: TypeAlias = Sequence[int]
PromptLike: TypeAlias = str | TokenIds
Prompts: TypeAlias = PromptLike | Sequence[PromptLike]
"""A text, a list of texts, a list of token ids, or a list of those; arrays count as lists."""

GivenParams: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None
    """None if it was given as token ids."""
    token_ids: list[int]


def read_prompts(given: Prompts) -> tuple[list[str | list[int]], bool]:
    """The prompts one by one, and whether one was given rather than a list."""
    if isinstance(given, str):
        return [given], True
    items = _items(given, "prompts")
    if items and all(isinstance(item, int) for item in items):
        return [_token_ids(items, "prompts")], True
    return [
        item if isinstance(item, str) else _token_ids(_items(item, name), name)
        for index, item in enumerate(items)
        for name in [f"prompts[{index}]"]
    ], False


def params_of_each(given: GivenParams, num_prompts: int) -> list[SamplingParams]:
    """One set for all prompts, or a list with one for each."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if isinstance(given, params.SamplingParams) or not all(
        isinstance(item, SamplingParams) for item in given
    ):
        raise InvalidRequest("sampling_params must be homing.llm.SamplingParams, one or a list")
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"there are {len(given)} sampling_params for {num_prompts} prompts: give one, or one "
            "for each",
            field="sampling_params",
        )
    return list(given)


def check_fits(
    token_ids: Sequence[int],
    sampling: params.SamplingParams,
    *,
    max_context_tokens: int,
    vocab_size: int,
) -> None:
    """Raise `InvalidRequest` unless the model can serve this."""
    num_tokens = len(token_ids)
    if not num_tokens:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is not in the vocabulary of {vocab_size}", field="prompt"
            )
    sampling.check_vocabulary(vocab_size)
    wanted = sampling.num_tokens_to_generate
    if num_tokens + (1 if wanted is None else wanted) > max_context_tokens:
        asked = "" if wanted is None else f" and {wanted:,} to generate"
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens:,} tokens{asked}; the model's maximum context length is "
            f"{max_context_tokens:,} tokens",
            field="prompt",
        )


def _items(given: Any, name: str) -> list[Any]:
    """The items of a list, a tuple or an array."""
    if hasattr(given, "tolist"):  # numpy and torch
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidRequest(
            f"{name} is of type {type(given).__name__}; it must be a text, a list of texts, a list "
            "of token ids or a list of those",
            field="prompt",
        )
    return list(given)


def _token_ids(items: list[Any], name: str) -> list[int]:
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidRequest(f"{name} holds {item!r}, which is no token id", field="prompt")
    return items
