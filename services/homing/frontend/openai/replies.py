"""Reply bodies: pieces of text become completions, chat completions and their chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from homing.frontend.openai.logprobs import (
    ChatLogProbs,
    CompletionLogProbs,
    PromptLogProbsList,
    chat_log_probs,
    completion_log_probs,
    prompt_log_probs,
)
from homing.frontend.openai.requests import ChatRequest, CompletionRequest
from homing.frontend.parsers import delta, message
from homing.frontend.text import Piece
from homing.tokenizer import Tokenizer

TokenIds = list[int] | UnsetType


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionChoice(Struct):
    """Of a whole completion and of a chunk alike."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogProbsList | UnsetType = UNSET


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    object: str = "text_completion"


class FunctionCall(Struct):
    arguments: str
    """JSON text; in a stream a fragment of it."""
    name: str | UnsetType = UNSET
    """In a stream on a call's first delta alone, as `id` and `type` are."""


class ToolCall(Struct):
    function: FunctionCall
    index: int | UnsetType = UNSET
    """In a stream: which of the message's calls this is part of."""
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same: clients look for either name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogProbsList | UnsetType = UNSET
    object: str = "chat.completion"


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET
    object: str = "chat.completion.chunk"


class Reply(Protocol):
    """How one request is answered."""

    def opening(self) -> Sequence[Struct]:
        """Chunks that come before any piece."""
        ...

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        """The chunks, at least one, that show a piece of choice `index`."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct:
        """The chunk without choices that ends a stream, when asked for."""
        ...

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct:
        """The answer that is not streamed; each choice is one piece."""
        ...


class CompletionReply:
    """Answers /v1/completions."""

    def __init__(
        self,
        request: CompletionRequest,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._model = model
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._begun: set[int] = set()

    def opening(self) -> Sequence[Struct]:
        return ()

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        choice = self._choice(index, piece, with_prompt=index not in self._begun)
        self._begun.add(index)
        return [self._completion([choice], usage)]

    def usage_chunk(self, usage: Usage) -> Struct:
        return self._completion([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct:
        return self._completion(
            [self._choice(index, piece, with_prompt=True) for index, piece in enumerate(choices)],
            usage,
        )

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)

    def _choice(self, index: int, piece: Piece, *, with_prompt: bool) -> CompletionChoice:
        request = self._request
        choice = CompletionChoice(index, piece.text, None, piece.finish_reason, piece.stop_reason)
        if request.logprobs is not None:
            shown = [*piece.prompt_tokens, *piece.tokens] if request.echo else piece.tokens
            choice.logprobs = completion_log_probs(self._tokenizer, shown, request.logprobs)
        if request.return_token_ids:
            choice.token_ids = [token.token_id for token in piece.tokens]
        if request.return_token_ids and with_prompt:
            choice.prompt_token_ids = self._prompts[index // request.num_choices]
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_log_probs(
                self._tokenizer, piece.prompt_tokens, request.prompt_logprobs
            )
        return choice


class ChatReply:
    """Answers /v1/chat/completions."""

    def __init__(
        self, request: ChatRequest, model: str, tokenizer: Tokenizer, prompt: list[int]
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_token_ids: TokenIds = prompt if request.return_token_ids else UNSET
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())

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
        choices[0].token_ids = self._token_ids(piece)
        choices[-1].finish_reason = piece.finish_reason
        choices[-1].stop_reason = piece.stop_reason
        return [self._chunk([choice], usage) for choice in choices]

    def usage_chunk(self, usage: Usage) -> Struct:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct:
        completion = ChatCompletion(
            self._id,
            self._created,
            self._model,
            [self._choice(index, piece) for index, piece in enumerate(choices)],
            usage,
            prompt_token_ids=self._prompt_token_ids,
        )
        if self._request.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_log_probs(
                self._tokenizer, choices[0].prompt_tokens, self._request.prompt_logprobs
            )
        return completion

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, choices, usage)

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index,
            msgspec.convert(message(piece.events), ChatMessage),
            self._log_probs(piece),
            piece.finish_reason,
            piece.stop_reason,
            self._token_ids(piece),
        )

    def _log_probs(self, piece: Piece) -> ChatLogProbs | None:
        if not self._request.logprobs:
            return None
        return chat_log_probs(self._tokenizer, piece.tokens, self._request.top_logprobs or 0)

    def _token_ids(self, piece: Piece) -> TokenIds:
        if not self._request.return_token_ids:
            return UNSET
        return [token.token_id for token in piece.tokens]
