"""Bodies of replies: completions, chat completions and their chunks."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from homing.frontend.openai.logprobs import ChatLogProbs, CompletionLogProbs, PromptLogProbsList

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


class Versions(Struct, kw_only=True):
    """Of the weights that the tokens of a reply or chunk were sampled under: the epoch."""

    weight_version: int | UnsetType = UNSET
    oldest_weight_version: int | UnsetType = UNSET
    """If there were several: then the other one is the newest."""


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
    token_weight_versions: TokenIds = UNSET
    """Of each token."""


class Completion(Versions):
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
    prompt_token_ids: TokenIds = UNSET
    """With `generation_token_ids` and `generation_log_probs` on request. Sent back in a later turn,
    they make its prompt go on from exactly these tokens."""
    generation_token_ids: TokenIds = UNSET
    generation_log_probs: list[float] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: TokenIds = UNSET
    token_weight_versions: TokenIds = UNSET


class ChatCompletion(Versions):
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
    token_weight_versions: TokenIds = UNSET


class ChatChunk(Versions):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogProbsList | UnsetType = UNSET
    object: str = "chat.completion.chunk"
