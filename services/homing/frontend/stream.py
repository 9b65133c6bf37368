"""From parts of tokens to one JSON body, or to server-sent events while they come.

What an answer tells of each token of a long prompt is made in the tokenizer's thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

import msgspec
from msgspec import UNSET, Struct
from quart import Response

from homing.client import Part
from homing.errors import HomingError, InternalError
from homing.frontend.generations import Generations, SubmitOptions
from homing.frontend.http_errors import error_body
from homing.frontend.job import Call, Job
from homing.frontend.measures import Stopwatch
from homing.frontend.openai.reply import Reply
from homing.frontend.openai.requests import GenerationRequest
from homing.frontend.openai.schemas import CompletionTokensDetails, PromptTokensDetails, Usage
from homing.frontend.text import Piece, join
from homing.frontend.tokenizing import TokenizerThread
from homing.tokenizer import Tokenizer

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""How often a comment is sent, for proxies that close silent connections."""
FIRST_PART_S = 5.0
"""How long a streamed answer waits to see whether its request is refused: an error that comes by
then has its own HTTP status."""

_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

SHORT_SCORES = 256
"""Prompt tokens whose log-probabilities are told from the event loop: some milliseconds."""

encode_json = msgspec.json.Encoder().encode


async def answer(job: Job, reply: Reply, call: Call) -> Response:
    """Generate, and answer in the way that the request asks for.

    Raises what ends a generation, as long as nothing was sent.
    """
    generations = Generations()
    generations.submit(
        call.client,
        job.prompts,
        job.params,
        num_choices=job.request.num_choices,
        options=_options(job.request, call),
        thinking=job.thinking,
    )
    choices = Choices(job, call.tokenizer, call.stopwatch)
    if not job.request.stream:
        return json_bytes(await _whole(generations, choices, reply, call.thread))
    generations.tick(FIRST_PART_S)
    first = await generations.next()
    generations.tick(KEEP_ALIVE_S)
    events = _events(job, generations, choices, reply, first, call.thread)
    response = Response(events, mimetype="text/event-stream", headers=_SSE_HEADERS)
    response.timeout = None  # an answer may take as long as it takes
    return response


def _options(request: GenerationRequest, call: Call) -> SubmitOptions:
    return SubmitOptions(
        request_id=request.external_id or call.request_id,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
        tenant=call.tenant,
    )


def json_response(body: Struct | dict, status: int = 200) -> Response:
    return json_bytes(encode_json(body), status)


def json_bytes(body: bytes, status: int = 200) -> Response:
    return Response(body, status, content_type="application/json")


class Choices:
    """The choices of one request under way: their texts, and what they cost so far."""

    def __init__(self, job: Job, tokenizer: Tokenizer, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._num_choices = job.request.num_choices
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0
        self._num_reasoning_tokens = 0
        self._choices = [
            job.choice(prompt, tokenizer)
            for prompt in job.prompts
            for _ in range(self._num_choices)
        ]
        self.num_unfinished = len(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def push(self, index: int, part: Part) -> Piece | None:
        """Take a part of choice `index`; the piece to show for it, if there is one."""
        self._stopwatch.part(index, part)
        self._num_completion_tokens += len(part.token_ids)
        if index % self._num_choices == 0:  # choices of a prompt share its tokens: count them once
            self._num_cached_tokens += part.num_cached_tokens or 0
        if part.finish is not None:
            self.num_unfinished -= 1
            if not self.num_unfinished:
                self._stopwatch.finish(self.usage)
        piece = self._choices[index].push(part)
        if piece is not None:
            self._num_reasoning_tokens += piece.num_reasoning_tokens
        return piece

    @property
    def usage(self) -> Usage:
        return Usage(
            self._num_prompt_tokens,
            self._num_completion_tokens,
            self._num_prompt_tokens + self._num_completion_tokens,
            PromptTokensDetails(self._num_cached_tokens),
            CompletionTokensDetails(self._num_reasoning_tokens),
        )


async def _whole(
    generations: Generations, choices: Choices, reply: Reply, thread: TokenizerThread
) -> bytes:
    pieces: list[list[Piece]] = [[] for _ in range(len(choices))]
    while choices.num_unfinished:
        for index, part in await generations.next():
            if piece := choices.push(index, part):
                pieces[index].append(piece)
    whole = [join(of_choice) for of_choice in pieces]

    def encoded() -> bytes:
        return encode_json(reply.whole(whole, choices.usage))

    return await thread.run(encoded) if _are_long(whole) else encoded()


async def _events(
    job: Job,
    generations: Generations,
    choices: Choices,
    reply: Reply,
    parts: Sequence[tuple[int, Part]],
    thread: TokenizerThread,
) -> AsyncIterator[bytes]:
    """The body of a streamed answer. What goes wrong now can only be told as an event."""

    def shown(index: int, piece: Piece) -> bytes:
        usage = choices.usage if job.request.wants_usage_on_chunks else UNSET
        return b"".join(map(_event, reply.chunks(index, piece, usage)))

    try:
        if opening := reply.opening():
            yield b"".join(map(_event, opening))
        while True:
            events = b""
            pushed = ((index, choices.push(index, part)) for index, part in parts)
            pieces = [(index, piece) for index, piece in pushed if piece]
            are_long = _are_long(piece for _, piece in pieces)
            for index, piece in pieces:
                if are_long:
                    events += await thread.run(partial(shown, index, piece))
                else:
                    events += shown(index, piece)
            if events or not parts:
                yield events or _KEEP_ALIVE
            if not choices.num_unfinished:
                break
            parts = await generations.next()
        if job.request.wants_usage_chunk and (last := reply.usage_chunk(choices.usage)):
            yield _event(last)
        yield _DONE
    except HomingError as error:
        yield _event(error_body(error))
    except Exception:
        # The status is sent and the client waits: whatever it is, this is the last thing to say.
        log.exception("a stream failed")
        yield _event(error_body(InternalError("the answer failed; the server's log says why")))


def _are_long(pieces: Iterable[Piece]) -> bool:
    """Their prompts' scores take so long to tell that others should not wait for it."""
    return sum(len(piece.prompt_tokens or ()) for piece in pieces) > SHORT_SCORES


def _event(body: Struct | dict) -> bytes:
    return b"data: " + encode_json(body) + b"\n\n"
