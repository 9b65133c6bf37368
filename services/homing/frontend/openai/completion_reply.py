"""Answers to /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msgspec import Struct, UnsetType

from homing.frontend.openai.logprobs import completion_log_probs, prompt_log_probs
from homing.frontend.openai.reply import (
    Head,
    spelling_of,
    stamp,
    token_ids,
    token_weight_versions,
)
from homing.frontend.openai.requests import CompletionRequest
from homing.frontend.openai.schemas import Completion, CompletionChoice, Usage
from homing.frontend.text import Piece
from homing.tokenizer import Tokenizer


class CompletionReply:
    """A `Reply`."""

    def __init__(
        self,
        request: CompletionRequest,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
    ) -> None:
        self._request = request
        self._spelling = spelling_of(request, tokenizer)
        self._prompts = prompts
        self._head = Head("cmpl", request, model)
        self._begun: set[int] = set()

    def opening(self) -> Sequence[Struct]:
        return ()

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        choice = self._choice(index, piece, with_prompt=index not in self._begun)
        self._begun.add(index)
        chunk = self._completion([choice], usage)
        stamp(chunk, [piece])
        return [chunk]

    def usage_chunk(self, usage: Usage) -> Struct:
        return self._completion([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct:
        completion = self._completion(
            [self._choice(index, piece, with_prompt=True) for index, piece in enumerate(choices)],
            usage,
        )
        stamp(completion, choices)
        return completion

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType) -> Completion:
        head = self._head
        return Completion(head.id, head.created, head.model, choices, usage)

    def _choice(self, index: int, piece: Piece, *, with_prompt: bool) -> CompletionChoice:
        request = self._request
        choice = CompletionChoice(
            index,
            piece.text,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=token_ids(request, piece),
            token_weight_versions=token_weight_versions(request, piece),
        )
        if request.logprobs is not None:
            before = piece.prompt_tokens if request.echo else None
            shown = chain(before or (), piece.tokens)
            choice.logprobs = completion_log_probs(self._spelling, shown, request.logprobs)
        if request.return_token_ids and with_prompt:
            choice.prompt_token_ids = self._prompts[index // request.num_choices]
        if request.prompt_logprobs is not None and with_prompt:
            choice.prompt_logprobs = prompt_log_probs(
                self._spelling, piece.prompt_tokens or (), request.prompt_logprobs
            )
        return choice
