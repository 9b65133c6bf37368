"""Request bodies, as OpenAI and vLLM name their fields, and how they are read.

Fields that nobody knows are ignored, as clients send more every year; null means the default. A
field that means something to others but that we do not honour is refused by name unless its value
asks for nothing: dropped in silence, the answer would look right and not be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from homing.errors import InvalidRequest
from homing.frontend.openai.reading import read_body
from homing.frontend.openai.structured import StructuredFields


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: the count so far on every chunk."""


class GenerationRequest(StructuredFields, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    """False: control tokens are part of the text."""
    return_weight_versions: bool | None = None
    """The version of the weights that each token was sampled under."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens `token_id:7` instead of by their texts."""
    priority: int | None = None
    """Lower is sooner; 0 unless given."""
    timeout_s: float | None = None
    """After so long the answer ends as it is, finish_reason `abort`."""
    request_id: str | None = None
    """A name for `/abort`, instead of X-Request-Id."""
    rid: str | None = None
    """The same, as SGLang calls it."""

    @property
    def external_id(self) -> str | None:
        """The name that the body gives the request."""
        return self.request_id or self.rid

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_on_chunks(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    """So many of the most probable tokens at each position; 0 gives the chosen one's alone."""
    best_of: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt itself: messages are not rendered."""
    input_ids: list[int] | None = None
    """The same, as SGLang calls it."""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """For the template; `none` also turns `enable_thinking` and `thinking` off."""
    enable_thinking: bool | None = None
    """As in `chat_template_kwargs`."""
    thinking_token_budget: int | None = None
    """After so many tokens the model is made to end its thoughts."""
    include_reasoning: bool | None = None
    """False: the model thinks, and the thoughts are left out of the reply."""
    separate_reasoning: bool | None = None
    """False: thoughts, and the marks around them, stay in the content."""


# Field -> values, besides null, that ask for nothing.
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "modalities": ([], ["text"]),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "stop_regex": ([], ""),
    "lora_path": (),
    "custom_logit_processor": (),
    "token_ids_logprob": ([],),
}
_NOT_IN_COMPLETIONS = {
    **_NOT_HONOURED,
    "thinking_token_budget": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
_NOT_IN_CHAT = {**_NOT_HONOURED, "echo": (False,), "best_of": (1,)}


R = TypeVar("R", bound=GenerationRequest)


def _with_fields(kind: type[R], names: Iterable[str]) -> type[R]:
    """A request of that kind with fields more."""
    fields = [(name, Any, None) for name in names]
    return cast(type[R], msgspec.defstruct("_Body", fields, bases=(kind,), kw_only=True))


_CompletionBody = _with_fields(CompletionRequest, _NOT_IN_COMPLETIONS)
_ChatBody = _with_fields(ChatRequest, _NOT_IN_CHAT)


def read_completion(body: bytes | str) -> CompletionRequest:
    """Raises `InvalidRequest` naming what is wrong."""
    request = read_body(_CompletionBody, body)
    _refuse(request, _NOT_IN_COMPLETIONS)
    if request.best_of not in (None, request.num_choices):
        raise InvalidRequest("best_of is not supported other than equal to n", field="best_of")
    return request


def read_chat(body: bytes | str) -> ChatRequest:
    """Raises `InvalidRequest` naming what is wrong."""
    request = read_body(_ChatBody, body)
    _refuse(request, _NOT_IN_CHAT)
    return request


def _refuse(request: Struct, not_honoured: dict[str, tuple[Any, ...]]) -> None:
    for name, harmless in not_honoured.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name} is not supported by this server", field=name)
