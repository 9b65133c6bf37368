"""Native bodies, read as completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from homing.errors import InvalidRequest
from homing.frontend.openai.reading import one_of, read_body
from homing.frontend.openai.requests import CompletionRequest, StreamOptions, read_completion
from homing.params.sampling import MAX_TOP_LOGPROBS

DEFAULT_NEW_TOKENS = 128
"""What SGLang generates when a request names no limit."""

# SGLang's name of a sampling parameter -> that of a completion's field.
_SAMPLING_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_OUTSIDE = ("prompt", "stream", "echo", "logprobs", "request_id", "rid", "cache_salt", "model")
"""Fields of a completion that are not sampling parameters."""

_SGLANG_ONLY = (
    "custom_logit_processor",
    "image_data",
    "input_embeds",
    "lora_path",
    "return_hidden_states",
    "session_params",
    "token_ids_logprob",
)


class GenerateBody(Struct, kw_only=True):
    """SGLang's."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    """From 0 on: the prompt's, too. None or -1: not."""
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    """Name, or one for each prompt, for `/abort`."""
    cache_salt: str | None = None
    extra_key: str | None = None
    """The same, as SGLang calls it."""
    model: str | None = None
    return_weight_versions: bool | None = None
    """Of each token."""
    custom_logit_processor: Any = None
    image_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    token_ids_logprob: Any = None


class TokensBody(Struct, kw_only=True):
    """vLLM's."""

    token_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    model: str | None = None
    return_weight_versions: bool | None = None
    features: Any = None


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A native request as a completion, and what that cannot say."""

    completion: CompletionRequest
    is_batch: bool = False
    """The answer is a list, also of one."""
    names: list[str] = field(default_factory=list)
    """Of its prompts, for `/abort`, if each has its own."""
    text_in_log_probs: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Field of the completion -> what the client called it."""
    prompt_scores_from: int = 0
    """The first prompt token whose log-probability is told."""


def read_generate(body: bytes | str) -> NativeRequest:
    """Raises `InvalidRequest` naming what is wrong."""
    request = read_body(GenerateBody, body)
    for name in _SGLANG_ONLY:
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported by this server", field=name)
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("give either text or input_ids", field="input_ids")
    prompt = request.input_ids if request.text is None else request.text
    num_top = request.top_logprobs_num or 0
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs_num is {num_top}; it must be from 0 to {MAX_TOP_LOGPROBS}",
            field="top_logprobs_num",
        )
    start = request.logprob_start_len
    wants_prompt = request.return_logprob and start is not None and start >= 0
    names = [request.rid] if isinstance(request.rid, str) else request.rid or []
    sampling = _one_set(request.sampling_params)
    completion = _completion(
        sampling,
        prompt=prompt,
        model=request.model,
        stream=request.stream,
        logprobs=num_top if request.return_logprob else None,
        prompt_logprobs=num_top if wants_prompt else None,
        cache_salt=one_of(cache_salt=request.cache_salt, extra_key=request.extra_key),
        return_weight_versions=request.return_weight_versions,
        request_id=names[0] if len(names) == 1 else None,
    )
    num_prompts = len(prompt) if isinstance(prompt, list) and not _is_ids(prompt) else 1
    if len(names) > 1 and len(names) != num_prompts:
        raise InvalidRequest(f"{len(names)} names for {num_prompts} prompts", field="rid")
    return NativeRequest(
        completion,
        is_batch=(isinstance(prompt, list) and not _is_ids(prompt)) or completion.num_choices > 1,
        names=names if len(names) > 1 else [],
        renamed=_renamed(sampling),
        text_in_log_probs=bool(request.return_text_in_logprobs),
        prompt_scores_from=start if wants_prompt and start else 0,
    )


def read_tokens(body: bytes | str) -> NativeRequest:
    """Raises `InvalidRequest` naming what is wrong."""
    request = read_body(TokensBody, body)
    if request.features:
        raise InvalidRequest("features is not supported by this server", field="features")
    completion = _completion(
        request.sampling_params or {},
        prompt=request.token_ids,
        model=request.model,
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        return_weight_versions=request.return_weight_versions,
        request_id=request.request_id,
        priority=request.priority,
    )
    return NativeRequest(completion, is_batch=True)


def _one_set(params: dict[str, Any] | list[dict[str, Any]] | None) -> dict[str, Any]:
    if not isinstance(params, list):
        return params or {}
    if any(other != params[0] for other in params):
        raise InvalidRequest(
            "all prompts of a request have the same sampling_params here", field="sampling_params"
        )
    return params[0] if params else {}


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(isinstance(item, int) for item in prompt)


def _completion(sampling: dict[str, Any], **fields: Any) -> CompletionRequest:
    named = {_SAMPLING_NAMES.get(name, name): value for name, value in sampling.items()}
    logprobs = named.pop("logprobs", None)  # vLLM has it here
    outside = {name: value for name, value in fields.items() if value is not None}
    values = {
        "max_tokens": DEFAULT_NEW_TOKENS,
        **{name: value for name, value in named.items() if name not in _OUTSIDE},
        **({} if logprobs is None else {"logprobs": logprobs}),
        **outside,
    }
    with own_names(_renamed(sampling)):
        return read_completion(msgspec.json.encode(values))


def _renamed(sampling: dict[str, Any]) -> dict[str, str]:
    """Completion's name -> SGLang's, of the parameters that were given by the latter."""
    return {ours: theirs for theirs, ours in _SAMPLING_NAMES.items() if theirs in sampling}


@contextmanager
def own_names(renamed: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field that the client calls otherwise are in its words."""
    try:
        yield
    except InvalidRequest as error:
        ours = error.field or ""
        if ours not in renamed:
            raise
        message = str(error).replace(ours, renamed[ours])
        raise InvalidRequest(message, field=renamed[ours]) from error
