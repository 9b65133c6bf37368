"""Completions, OpenAI's and native ones: prompts, in whichever form they come, become token ids.

What is called `prepare_...` makes of a request's body what the fleet is to do, and how that will be
answered. It raises `InvalidRequest`, works on the whole prompt, and may run in any thread.
"""

from __future__ import annotations

from dataclasses import replace

from homing.errors import InvalidRequest
from homing.frontend.job import Call, Job
from homing.frontend.native import (
    GenerateReply,
    NativeRequest,
    TokensReply,
    own_names,
    read_generate,
    read_tokens,
)
from homing.frontend.openai.completion_reply import CompletionReply
from homing.frontend.openai.reply import Reply
from homing.frontend.openai.requests import CompletionRequest, read_completion
from homing.frontend.openai.sampling import MAX_CHOICES, completion_params
from homing.frontend.service import ServedModel
from homing.frontend.tokenizing import Prompt, encode_within
from homing.wire import pack_tokens


def prepare_completion(body: bytes, model: ServedModel, call: Call) -> tuple[Job, Reply]:
    request = read_completion(body)
    name = model.answers_to(request.model)
    job = _job(request, model)
    reply = CompletionReply(request, name, model.tokenizer, [p.token_ids for p in job.prompts])
    return job, reply


def prepare_generate(body: bytes, model: ServedModel, call: Call) -> tuple[Job, Reply]:
    """SGLang's /generate."""
    request = read_generate(body)
    job = _native_job(request, model)
    reply = GenerateReply(
        request,
        model.tokenizer,
        [prompt.token_ids for prompt in job.prompts],
        request_id=request.completion.request_id or call.request_id,
        epoch=call.client.fleet.epoch,
    )
    return job, reply


def prepare_tokens(body: bytes, model: ServedModel, call: Call) -> tuple[Job, Reply]:
    """vLLM's /inference/v1/generate."""
    request = read_tokens(body)
    job = _native_job(request, model)
    return job, TokensReply(request, model.tokenizer, request_id=call.request_id)


def _native_job(request: NativeRequest, model: ServedModel) -> Job:
    """A completion, each prompt with its own name if it has one."""
    model.answers_to(request.completion.model)
    with own_names(request.renamed):
        job = _job(request.completion, model)
    if not request.names:
        return job
    named = [
        replace(prompt, request_id=name)
        for prompt, name in zip(job.prompts, request.names, strict=True)
    ]
    return replace(job, prompts=named)


def _job(request: CompletionRequest, model: ServedModel) -> Job:
    params = completion_params(request)
    given = _split(request.prompt)
    num_choices = len(given) * request.num_choices
    if num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(given)} prompts with n {request.num_choices} make {num_choices} choices; "
            f"the limit is {MAX_CHOICES}",
            field="prompt",
        )
    return Job(
        request,
        [_prompt(prompt, request, model) for prompt in given],
        params,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def _split(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts apart: a list of ids is one prompt, a list of strings or of lists is several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", field="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise InvalidRequest("prompt mixes token ids with whole prompts", field="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def _prompt(given: str | list[int], request: CompletionRequest, model: ServedModel) -> Prompt:
    if isinstance(given, str):
        token_ids = _encode(given, model)
    elif given:
        token_ids = check_token_ids(given, model.card.vocab_size, field="prompt")
    else:
        raise InvalidRequest("prompt holds an empty list of token ids", field="prompt")
    text = None
    if request.echo:  # as it was written; of ids, the whole characters that they spell
        text = given if isinstance(given, str) else model.tokenizer.decode_whole(token_ids)
    return Prompt(token_ids, pack_tokens(token_ids), text)


def _encode(text: str, model: ServedModel) -> list[int]:
    tokenizer, max_tokens = model.tokenizer, model.card.max_context_tokens
    token_ids = encode_within(tokenizer, text, max_tokens, add_special_tokens=True)
    if token_ids:
        return token_ids
    if tokenizer.bos_token_id is None:
        raise InvalidRequest(
            "prompt is empty, and this model has no token to begin a text with", field="prompt"
        )
    return [tokenizer.bos_token_id]


def check_token_ids(token_ids: list[int], vocab_size: int, *, field: str) -> list[int]:
    """The ids, if they are in the vocabulary. Raises `InvalidRequest`."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} in {field} is not in the vocabulary of {vocab_size}",
                field=field,
            )
    return token_ids
