"""Answers to /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from homing.frontend.openai.logprobs import (
    ChatLogProbs,
    PromptLogProbsList,
    chat_log_probs,
    finite,
    prompt_log_probs,
)
from homing.frontend.openai.reply import (
    Head,
    spelling_of,
    stamp,
    token_ids,
    token_weight_versions,
)
from homing.frontend.openai.requests import ChatRequest
from homing.frontend.openai.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    TokenIds,
    Usage,
)
from homing.frontend.parsers import delta, message
from homing.frontend.text import Piece
from homing.tokenizer import Tokenizer


class ChatReply:
    """A `Reply`."""

    def __init__(
        self, request: ChatRequest, model: str, tokenizer: Tokenizer, prompt: list[int]
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._spelling = spelling_of(request, tokenizer)
        self._prompt_token_ids: TokenIds = prompt if request.return_token_ids else UNSET
        self._head = Head("chatcmpl", request, model)

    def opening(self) -> Sequence[Struct]:
        """Who speaks, for each choice, and the prompt's ids on the first chunk."""
        chunks = [
            self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))], UNSET)
            for index in range(self._request.num_choices)
        ]
        chunks[0].prompt_token_ids = self._prompt_token_ids
        return chunks

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        """One for each event. The tokens behind them are told with the first."""
        deltas = [msgspec.convert(delta(event), ChatDelta) for event in piece.events]
        choices = [ChatChunkChoice(index, each) for each in deltas or [ChatDelta()]]
        choices[0].logprobs = self._log_probs(piece)
        choices[0].token_ids = token_ids(self._request, piece)
        choices[0].token_weight_versions = token_weight_versions(self._request, piece)
        choices[-1].finish_reason = piece.finish_reason
        choices[-1].stop_reason = piece.stop_reason
        chunks = [self._chunk([choice], usage) for choice in choices]
        chunks[0].prompt_logprobs = self._prompt_log_probs(piece)
        for chunk in chunks:
            stamp(chunk, [piece])
        return chunks

    def usage_chunk(self, usage: Usage) -> Struct:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct:
        head = self._head
        completion = ChatCompletion(
            head.id,
            head.created,
            head.model,
            [self._choice(index, piece) for index, piece in enumerate(choices)],
            usage,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_log_probs(choices[0]),
        )
        stamp(completion, choices)
        return completion

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, head.created, head.model, choices, usage)

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index,
            self._message(piece),
            self._log_probs(piece),
            piece.finish_reason,
            piece.stop_reason,
            token_ids(self._request, piece),
            token_weight_versions(self._request, piece),
        )

    def _message(self, piece: Piece) -> ChatMessage:
        """With `return_token_ids`, what a later turn needs to go on from these very tokens."""
        whole = msgspec.convert(message(piece.events), ChatMessage)
        if self._request.return_token_ids:
            whole.prompt_token_ids = self._prompt_token_ids
            whole.generation_token_ids = token_ids(self._request, piece)
            if self._request.logprobs:
                scores = [finite(token.log_prob or 0.0) for token in piece.tokens]
                whole.generation_log_probs = scores
        return whole

    def _prompt_log_probs(self, piece: Piece) -> PromptLogProbsList | UnsetType:
        """In a choice's first piece, on request."""
        num_top = self._request.prompt_logprobs
        if num_top is None or piece.prompt_tokens is None:
            return UNSET
        return prompt_log_probs(self._spelling, piece.prompt_tokens, num_top)

    def _log_probs(self, piece: Piece) -> ChatLogProbs | None:
        if not self._request.logprobs:
            return None
        return chat_log_probs(
            self._tokenizer, self._spelling, piece.tokens, self._request.top_logprobs or 0
        )
