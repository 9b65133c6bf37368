"""From what is asked to a request, or to the reason why it cannot be served."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from homing.engine.bad_words import BadWords
from homing.engine.limits import EngineLimits
from homing.engine.models import ModelShape
from homing.engine.request import Request, RequestKey
from homing.engine.stop_words import StopWords
from homing.errors import ContextLengthExceeded, InvalidRequest
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer


class Intake:
    def __init__(
        self, shape: ModelShape, limits: EngineLimits, tokenizer: Tokenizer | None
    ) -> None:
        self._shape = shape
        self._limits = limits
        self._tokenizer = tokenizer

    def request(
        self,
        key: RequestKey,
        prompt: NDArray[np.integer],
        sampling: SamplingParams,
        *,
        num_resumed: int,
        max_new_tokens: int | None,
        priority: int,
        cache_salt: str,
        epoch: int,
    ) -> Request:
        """Raises InvalidRequest, naming the field at fault."""
        self._check_prompt(prompt, sampling, num_resumed)
        sampling.check_vocabulary(self._shape.vocab_size)
        eos = () if sampling.ignore_eos else self._shape.eos_token_ids
        return Request(
            key,
            prompt.astype(np.int32),
            sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            block_size=self._limits.block_size,
            max_new_tokens=self._room(len(prompt), sampling, num_resumed, max_new_tokens),
            num_resumed=num_resumed,
            priority=priority,
            cache_salt=cache_salt,
            epoch=epoch,
            shares_prefix=self._limits.prefix_caching,
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            stop_words=self._stop_words(prompt[: len(prompt) - num_resumed], sampling.stop_words),
            bad_words=self._bad_words(sampling.bad_words),
        )

    def _check_prompt(
        self, prompt: NDArray[np.integer], sampling: SamplingParams, num_resumed: int
    ) -> None:
        if not len(prompt):
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        if num_resumed >= len(prompt):
            raise InvalidRequest("all tokens are resumed ones; none is a prompt", field="prompt")
        limit = self._limits.max_context_tokens
        must_generate = sampling.num_tokens_to_generate != 0 and not num_resumed
        if len(prompt) + must_generate > limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt):,} tokens; the model's maximum context length is "
                f"{limit:,} tokens, the answer included",
                field="prompt",
            )
        for token in (int(prompt.min()), int(prompt.max())):
            if not 0 <= token < self._shape.vocab_size:
                raise InvalidRequest(
                    f"token id {token} is not in the vocabulary of {self._shape.vocab_size}",
                    field="prompt",
                )

    def _room(
        self,
        num_tokens: int,
        sampling: SamplingParams,
        num_resumed: int,
        max_new_tokens: int | None,
    ) -> int:
        """The most tokens that may be generated in this attempt."""
        limits = [self._limits.max_context_tokens - num_tokens]
        if sampling.num_tokens_to_generate is not None:
            limits.append(sampling.num_tokens_to_generate - num_resumed)
        if max_new_tokens is not None:
            limits.append(max_new_tokens)
        return max(0, min(limits))

    def _stop_words(self, prompt: NDArray[np.integer], words: tuple[str, ...]) -> StopWords | None:
        if not words:
            return None
        if self._tokenizer is None:
            raise InvalidRequest("stop words need a tokenizer: there is none", field="stop_words")
        return StopWords(self._tokenizer, prompt.tolist(), words)

    def _bad_words(self, words: tuple[str, ...]) -> BadWords | None:
        if not words:
            return None
        if self._tokenizer is None:
            raise InvalidRequest("bad words need a tokenizer: there is none", field="bad_words")
        return BadWords(self._tokenizer, words)
