"""The forms in which prompts may be given, and the checks that they and their parameters pass
before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from homing import params
from homing.errors import ContextLengthExceeded, InvalidRequest
from homing.llm.params import SamplingParams
from homing.llm.results import Result, Status
from homing.llm.text import TextCodec
from homing.wire import ModelCard

TokenIds: TypeAlias = Sequence[int]
PromptLike: TypeAlias = str | TokenIds
Prompts: TypeAlias = PromptLike | Result | Sequence[PromptLike | Result]
"""A text, a list of texts, a list of token ids, or a list of those; arrays count as lists. An
aborted result is a prompt, too: its generation goes on."""

GivenPrompt: TypeAlias = str | list[int] | Result

GivenParams: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None
    """None if it was given as token ids."""
    token_ids: list[int]
    resumed: Result | None = None
    """What was generated for it before."""

    @property
    def resumed_tokens(self) -> list[int]:
        return [] if self.resumed is None else self.resumed.generated_tokens

    @property
    def all_tokens(self) -> list[int]:
        """Those that were generated before included."""
        return [*self.token_ids, *self.resumed_tokens]


@dataclass(frozen=True, slots=True)
class Batch:
    """What `generate` and `stream` are given: prompts one by one, and the parameters of each."""

    prompts: list[GivenPrompt]
    sampling: list[SamplingParams]
    multi_modal_data: Any
    is_single: bool
    """One prompt was given rather than a list."""

    def __len__(self) -> int:
        return len(self.prompts)

    def check_media(self, card: ModelCard) -> None:
        """Raise `InvalidRequest` for media: no model that is served here takes any."""
        if self.multi_modal_data is not None:
            raise InvalidRequest(
                f"the model {card.name} takes no media: multi_modal_data must be None",
                field="multi_modal_data",
            )


def read_batch(prompts: Prompts, sampling_params: GivenParams, multi_modal_data: Any) -> Batch:
    """Raises `InvalidRequest` for what is no prompt, or for parameters that are not as many."""
    given, is_single = read_prompts(prompts)
    sampling = params_of_each(sampling_params, len(given))
    return Batch(given, sampling, multi_modal_data, is_single)


def read_prompts(given: Prompts) -> tuple[list[GivenPrompt], bool]:
    """The prompts one by one, and whether one was given rather than a list."""
    if isinstance(given, str | Result):
        return [given], True
    items = _items(given, "prompts")
    if items and all(isinstance(item, int) for item in items):
        return [_token_ids(items, "prompts")], True
    return [
        item if isinstance(item, str | Result) else _token_ids(_items(item, name), name)
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


def prepare(
    given: GivenPrompt, sampling: SamplingParams, codec: TextCodec, card: ModelCard
) -> tuple[Prompt, params.SamplingParams]:
    """Tokenize and check; what an engine is to be told. Raises `InvalidRequest`."""
    if isinstance(given, Result):
        prompt = _resumed(given)
    elif isinstance(given, str):
        prompt = Prompt(given, codec.encode(given, sampling))
    else:
        prompt = Prompt(None, given)
    for_engine = sampling.for_engine(len(prompt.token_ids))
    if prompt.resumed is not None:
        for_engine = _resuming(for_engine, sampling, prompt.resumed)
    check_fits(prompt, for_engine, card)
    return prompt, for_engine


def check_fits(prompt: Prompt, sampling: params.SamplingParams, card: ModelCard) -> None:
    """Raise `InvalidRequest` unless the model can serve this."""
    token_ids = prompt.token_ids
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < card.vocab_size:
            raise InvalidRequest(
                f"token id {token} is not in the vocabulary of {card.vocab_size}", field="prompt"
            )
    sampling.check_vocabulary(card.vocab_size)
    wanted = sampling.num_tokens_to_generate
    least = len(prompt.resumed_tokens) + 1 if wanted is None else wanted
    if len(token_ids) + least > card.max_context_tokens:
        asked = "" if wanted is None else f" and {wanted:,} to generate"
        raise ContextLengthExceeded(
            f"the prompt has {len(token_ids):,} tokens{asked}; the model's maximum context length "
            f"is {card.max_context_tokens:,} tokens",
            field="prompt",
        )


def _resumed(result: Result) -> Prompt:
    if result.status is not Status.ABORTED or result.prompt_tokens is None:
        raise InvalidRequest(
            f"a {result.status} result is no prompt: only one that was aborted, and has its "
            "prompt_tokens, as return_prompt_tokens gives them",
            field="prompt",
        )
    return Prompt(result.prompt, result.prompt_tokens, result)


def _resuming(
    for_engine: params.SamplingParams, sampling: SamplingParams, resumed: Result
) -> params.SamplingParams:
    """Go on with the noise that it began with; what it has need not be computed again."""
    return msgspec.structs.replace(
        for_engine,
        seed=resumed.seed if sampling.seed is None else sampling.seed,
        skip_prompt_log_probs=for_engine.skip_prompt_log_probs
        or resumed.prompt_log_probs is not None,
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
