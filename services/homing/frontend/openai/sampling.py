"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from typing import Any

from homing.client.checks import check_urgency
from homing.errors import InvalidRequest
from homing.frontend.openai.reading import one_of
from homing.frontend.openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from homing.frontend.openai.structured import structured_output
from homing.frontend.openai.tools import tools_structure
from homing.frontend.parsers import ToolChoice
from homing.params import SamplingParams, StructuredOutput
from homing.params.sampling import MAX_TOP_LOGPROBS

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI generates when a completion names no limit."""
MAX_CHOICES = 2048
"""Most answers that one HTTP request may ask for."""
MAX_REQUEST_ID_CHARACTERS = 256

# What a client calls the fields that it knows by other names.
_CLIENT_NAMES = {
    "num_tokens_to_generate": "max_tokens",
    "stop_words": "stop",
    "detokenize_stop_sequence": "include_stop_str_in_output",
}


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Raises `InvalidRequest` naming the client's field."""
    wants_prompt = request.prompt_logprobs is not None or (
        bool(request.echo) and request.logprobs is not None
    )
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(
        request,
        max_tokens=max_tokens,
        num_top=request.logprobs,
        num_top_field="logprobs",
        wants_prompt=wants_prompt,
        shape=structured_output(request),
    )


def chat_params(
    request: ChatRequest, choice: ToolChoice, tool_format: str | None
) -> SamplingParams:
    """`choice`: what the request may call; `tool_format`: how the model writes calls. Raises
    `InvalidRequest` naming the client's field."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    for field in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, field)
        if value is not None and value < 1:
            raise InvalidRequest(f"{field} is {value}; it must be at least 1", field=field)
    max_tokens = request.max_completion_tokens or request.max_tokens
    return _params(
        request,
        max_tokens=max_tokens,
        num_top=(request.top_logprobs or 0) if request.logprobs else None,
        num_top_field="top_logprobs",
        wants_prompt=request.prompt_logprobs is not None,
        shape=tools_structure(request, choice, tool_format),
    )


def _params(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    num_top: int | None,
    num_top_field: str,
    wants_prompt: bool,
    shape: StructuredOutput | None,
) -> SamplingParams:
    """`num_top`: None when no log-probabilities are asked for; `shape`: of the whole answer."""
    _in_range("n", request.num_choices, 1, MAX_CHOICES)
    check_urgency(request.priority or 0, request.timeout_s)
    one_of(request_id=request.request_id, rid=request.rid)
    if len(request.external_id or "") > MAX_REQUEST_ID_CHARACTERS:
        field = "request_id" if request.request_id else "rid"
        raise InvalidRequest(
            f"{field} is longer than {MAX_REQUEST_ID_CHARACTERS} characters", field=field
        )
    _in_range(num_top_field, num_top or 0, 0, MAX_TOP_LOGPROBS)
    _in_range("prompt_logprobs", request.prompt_logprobs or 0, 0, MAX_TOP_LOGPROBS)
    values: dict[str, Any] = {
        "temperature": request.temperature,
        "min_p": request.min_p,
        "seed": request.seed,
        "num_tokens_to_generate": max_tokens,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "stop_token_ids": None if request.stop_token_ids is None else tuple(request.stop_token_ids),
        "stop_words": _stop_words(request.stop),
        "detokenize_stop_sequence": request.include_stop_str_in_output,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "bad_words": None if request.bad_words is None else tuple(request.bad_words),
        "allowed_token_ids": (
            None if request.allowed_token_ids is None else tuple(request.allowed_token_ids)
        ),
        "return_log_probs": num_top is not None or wants_prompt,
        "skip_prompt_log_probs": not wants_prompt,
        "top_n_logprobs": max(num_top or 0, request.prompt_logprobs or 0),
        "structured_output": shape,
        **_truncation(request),
    }
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        raise _in_client_names(error) from error


def _in_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}; it must be from {low} to {high}", field=field)


def _truncation(request: GenerationRequest) -> dict[str, Any]:
    """top_k and top_p. Clients write "off" as -1 or 0 and as 1, and mean the single most probable
    token by top_p 0, where ours is off."""
    if request.top_p == 0:
        return {"top_k": 1}
    top_k = 0 if request.top_k == -1 else request.top_k
    return {"top_k": top_k, "top_p": request.top_p}


def _stop_words(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _in_client_names(error: InvalidRequest) -> InvalidRequest:
    message = str(error)
    for ours, theirs in _CLIENT_NAMES.items():
        message = message.replace(ours, theirs)
    return InvalidRequest(message, field=_CLIENT_NAMES.get(error.field or "", error.field))
