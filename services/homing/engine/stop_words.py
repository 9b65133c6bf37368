"""Finds a request's stop words in the text that its tokens spell."""

from __future__ import annotations

from collections.abc import Sequence

from homing.tokenizer import IncrementalDecoder, StopMatcher, Tokenizer


class StopWords:
    """Only for requests that have stop words: the others are never decoded here.

    Decoder and matcher are those that frontends use, so both end an answer at the same character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], words: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._matcher = StopMatcher(words, include=True)

    def push(self, token_ids: Sequence[int]) -> str | None:
        """The stop word that these tokens complete."""
        return self._matcher.push(self._decoder.push(token_ids))[1]
