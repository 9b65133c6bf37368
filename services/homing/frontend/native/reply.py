"""Native answers: SGLang's objects with `meta_info`, vLLM's choices of token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from homing.frontend.native.requests import NativeRequest
from homing.frontend.openai.blocks import json_list
from homing.frontend.openai.logprobs import (
    ChatLogProbs,
    PromptLogProbsList,
    chat_log_probs,
    finite,
    prompt_log_probs,
)
from homing.frontend.openai.reply import spelling_of, stamp
from homing.frontend.openai.schemas import Usage, Versions
from homing.frontend.text import Piece, Token
from homing.tokenizer import Tokenizer

TokenLogProb = tuple[float | None, int, str | None]
"""SGLang's: log-probability, token id, text if asked for."""


class MetaInfo(Struct, kw_only=True):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    """Of the newest token."""
    token_weight_versions: list[int] | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    """Seconds; when all is there."""
    output_token_logprobs: list[TokenLogProb] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenLogProb]] | UnsetType = UNSET
    input_token_logprobs: list[TokenLogProb] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenLogProb] | None] | UnsetType = UNSET


class Generated(Struct):
    """One choice, or in a stream what is new of it."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """In a stream: prompt * n + k."""


class GenerateReply:
    """Answers /generate, a `Reply`. Events of a stream hold what is new, and counts so far."""

    def __init__(
        self,
        request: NativeRequest,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        *,
        request_id: str,
        epoch: int,
    ) -> None:
        """`epoch`: of the fleet, for what ends before it has a token."""
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._id = request_id
        self._epoch = epoch
        self._started_at = time.perf_counter()
        num_choices = len(prompts) * request.completion.num_choices
        self._num_tokens = [0] * num_choices
        self._num_cached = [0] * num_choices

    def opening(self) -> Sequence[Struct]:
        return ()

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        generated = self._generated(index, piece)
        generated.index = index
        return [generated]

    def usage_chunk(self, usage: Usage) -> None:
        return None

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct | list[Struct]:
        generated: list[Struct] = [
            self._generated(index, piece) for index, piece in enumerate(choices)
        ]
        return generated if self._request.is_batch else generated[0]

    def _generated(self, index: int, piece: Piece) -> Generated:
        self._num_tokens[index] += len(piece.tokens)
        self._num_cached[index] += piece.num_cached_tokens
        prompt, k = divmod(index, self._request.completion.num_choices)
        name = self._request.names[prompt] if self._request.names else self._id
        info = MetaInfo(
            id=name if not k else f"{name}-{k}",
            finish_reason=self._finish_reason(index, piece),
            prompt_tokens=len(self._prompts[prompt]),
            completion_tokens=self._num_tokens[index],
            cached_tokens=self._num_cached[index],
            weight_version=str(self._epoch if piece.oldest_epoch is None else piece.newest_epoch),
        )
        if piece.finish_reason is not None:
            info.e2e_latency = time.perf_counter() - self._started_at
        self._add_scores(info, piece)
        return Generated(piece.text, [token.token_id for token in piece.tokens], info)

    def _finish_reason(self, index: int, piece: Piece) -> dict[str, Any] | None:
        match piece.finish_reason:
            case None:
                return None
            case "stop":
                matched = piece.stop_reason
                if matched is None and piece.tokens:
                    matched = piece.tokens[-1].token_id
                return {"type": "stop", "matched": matched}
            case "length":
                return {"type": "length", "length": self._num_tokens[index]}
            case other:
                return {"type": other}

    def _add_scores(self, info: MetaInfo, piece: Piece) -> None:
        completion = self._request.completion
        if completion.return_weight_versions:
            info.token_weight_versions = [token.epoch for token in piece.tokens]
        if completion.logprobs is None:
            return
        info.output_token_logprobs = [self._score(token) for token in piece.tokens]
        if completion.logprobs:
            info.output_top_logprobs = [self._top(token) for token in piece.tokens]
        start, prompt = self._request.prompt_scores_from, piece.prompt_tokens
        if prompt is None or len(prompt) <= start:
            return
        info.input_token_logprobs = json_list(map(self._score, islice(prompt, start, None)))
        if completion.logprobs:
            info.input_top_logprobs = json_list(
                None if token.log_prob is None else self._top(token)
                for token in islice(prompt, start, None)
            )

    def _score(self, token: Token) -> TokenLogProb:
        return self._entry(token.token_id, token.log_prob)

    def _top(self, token: Token) -> list[TokenLogProb]:
        num_top = self._request.completion.logprobs or 0
        return [self._entry(*entry) for entry in (token.top or ())[:num_top]]

    def _entry(self, token_id: int, log_prob: float | None) -> TokenLogProb:
        text = self._tokenizer.token_text(token_id) if self._request.text_in_log_probs else None
        return (None if log_prob is None else finite(log_prob), token_id, text)


class TokensChoice(Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: ChatLogProbs | None = None
    token_weight_versions: list[int] | UnsetType = UNSET


class Tokens(Versions):
    request_id: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: PromptLogProbsList | UnsetType = UNSET


class TokensReply:
    """Answers /inference/v1/generate, a `Reply`."""

    def __init__(self, request: NativeRequest, tokenizer: Tokenizer, *, request_id: str) -> None:
        self._request = request.completion
        self._tokenizer = tokenizer
        self._spelling = spelling_of(request.completion, tokenizer)
        self._id = request.completion.request_id or request_id

    def opening(self) -> Sequence[Struct]:
        return ()

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        return [self._tokens([self._choice(index, piece)], [piece], usage)]

    def usage_chunk(self, usage: Usage) -> Struct:
        return Tokens(request_id=self._id, choices=[], usage=usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct:
        answers = [self._choice(index, piece) for index, piece in enumerate(choices)]
        return self._tokens(answers, choices, usage)

    def _tokens(
        self, choices: list[TokensChoice], pieces: Sequence[Piece], usage: Usage | UnsetType
    ) -> Tokens:
        tokens = Tokens(request_id=self._id, choices=choices, usage=usage)
        stamp(tokens, pieces)
        num_top = self._request.prompt_logprobs
        prompt = pieces[0].prompt_tokens
        if num_top is not None and prompt is not None:
            tokens.prompt_logprobs = prompt_log_probs(self._spelling, prompt, num_top)
        return tokens

    def _choice(self, index: int, piece: Piece) -> TokensChoice:
        choice = TokensChoice(
            index=index,
            token_ids=[token.token_id for token in piece.tokens],
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._request.logprobs is not None:
            choice.logprobs = chat_log_probs(
                self._tokenizer, self._spelling, piece.tokens, self._request.logprobs
            )
        if self._request.return_weight_versions:
            choice.token_weight_versions = [token.epoch for token in piece.tokens]
        return choice
