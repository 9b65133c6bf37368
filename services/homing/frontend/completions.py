"""/v1/completions: prompts, in whichever form they come, become token ids."""

from __future__ import annotations

from dataclasses import replace

from homing.errors import InvalidRequest
from homing.frontend.native import NativeRequest, own_names
from homing.frontend.openai.requests import CompletionRequest
from homing.frontend.openai.sampling import MAX_CHOICES, completion_params
from homing.frontend.service import ServedModel
from homing.frontend.stream import Job
from homing.frontend.tokenizing import SHORT_PROMPT, Prompt, encode_within
from homing.tokenizer import Tokenizer


async def completion_job(request: CompletionRequest, model: ServedModel) -> Job:
    """What a request asks for. Raises `InvalidRequest`."""
    params = completion_params(request)
    prompts = await completion_prompts(request, model)
    return Job(
        request,
        prompts,
        params,
        echo=bool(request.echo),
        skip_special_tokens=request.skip_special_tokens is not False,
    )


async def native_job(request: NativeRequest, model: ServedModel) -> Job:
    """A completion, each prompt with its own name if it has one. Raises `InvalidRequest`."""
    with own_names(request.renamed):
        job = await completion_job(request.completion, model)
    if not request.names:
        return job
    named = [
        replace(prompt, request_id=name)
        for prompt, name in zip(job.prompts, request.names, strict=True)
    ]
    return replace(job, prompts=named)


async def completion_prompts(request: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """One for each prompt of the request, in its order. Raises `InvalidRequest`."""
    given = _split(request.prompt)
    if len(given) * request.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(given)} prompts with n {request.num_choices} make "
            f"{len(given) * request.num_choices} choices; the limit is {MAX_CHOICES}",
            field="prompt",
        )

    def read(tokenizer: Tokenizer) -> list[Prompt]:
        return [_prompt(prompt, model, tokenizer) for prompt in given]

    if sum(map(len, given)) <= SHORT_PROMPT:
        return read(model.tokenizer)
    return await model.thread.run(read)


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


def _prompt(given: str | list[int], model: ServedModel, tokenizer: Tokenizer) -> Prompt:
    if not isinstance(given, str):
        if not given:
            raise InvalidRequest("prompt holds an empty list of token ids", field="prompt")
        return Prompt(check_token_ids(given, model.card.vocab_size, field="prompt"))
    max_tokens = model.card.max_context_tokens
    token_ids = encode_within(tokenizer, given, max_tokens, add_special_tokens=True)
    if not token_ids:
        if tokenizer.bos_token_id is None:
            raise InvalidRequest(
                "prompt is empty, and this model has no token to begin a text with", field="prompt"
            )
        token_ids = [tokenizer.bos_token_id]
    return Prompt(token_ids, given)


def check_token_ids(token_ids: list[int], vocab_size: int, *, field: str) -> list[int]:
    """The ids, if they are in the vocabulary. Raises `InvalidRequest`."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} in {field} is not in the vocabulary of {vocab_size}",
                field=field,
            )
    return token_ids
