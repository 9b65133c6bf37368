"""Text to tokens and back, with a place for the caller's own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from homing.errors import InvalidRequest
from homing.llm.params import SamplingParams
from homing.tokenizer import IncrementalDecoder, Tokenizer

TokenizePrompt: TypeAlias = Callable[[str], list[int]]
DetokenizeGenerations: TypeAlias = Callable[[list[int], list[int]], str]


@dataclass(frozen=True, slots=True)
class TextHooks:
    """What takes the tokenizer's place. None: the tokenizer itself."""

    tokenize_prompt: TokenizePrompt | None = None
    """The token ids of a prompt given as text."""
    detokenize_generations: DetokenizeGenerations | None = None
    """The text of an answer: (prompt's token ids, generated token ids, less the one that only
    ended it). Called with all tokens so far at each step, and should only append to what it gave
    before, but for U+FFFD in place of an unfinished character at the end."""


class AnswerDecoder(Protocol):
    """Tokens become text that never shrinks."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextCodec:
    """A tokenizer and the hooks over it."""

    def __init__(self, tokenizer: Tokenizer, hooks: TextHooks) -> None:
        self._tokenizer = tokenizer
        self._hooks = hooks

    def encode(self, text: str, params: SamplingParams) -> list[int]:
        if self._hooks.tokenize_prompt:
            ids = list(self._hooks.tokenize_prompt(text))
        else:
            ids = self._tokenizer.encode(text)
        bos = self._tokenizer.bos_token_id
        if params.add_BOS and bos is None:
            raise InvalidRequest("add_BOS: this model knows no BOS token", field="add_BOS")
        begins = ids[:1] == [bos]
        if bos is not None and not begins and (params.add_BOS or not ids):
            ids.insert(0, bos)
        return ids

    def decoder(self, prompt_ids: list[int]) -> AnswerDecoder:
        """For one answer to this prompt."""
        if self._hooks.detokenize_generations:
            return _HookDecoder(self._hooks.detokenize_generations, prompt_ids)
        return IncrementalDecoder(self._tokenizer, prompt_ids)


class _HookDecoder:
    """Shows what each call of the hook appends to what it gave before. U+FFFD at the end may be a
    character that is not finished, and waits."""

    def __init__(self, detokenize: DetokenizeGenerations, prompt_ids: list[int]) -> None:
        self._detokenize = detokenize
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []
        self._text = ""
        self._num_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        if ids:
            self._ids += ids
            self._text = self._detokenize(self._prompt_ids, list(self._ids))
        return self._show(len(self._text.rstrip("\ufffd")))

    def finish(self) -> str:
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        start, self._num_shown = self._num_shown, max(self._num_shown, end)
        return self._text[start : self._num_shown]
