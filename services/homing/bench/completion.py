"""One streamed completion of an OpenAI server, as its client sees it in time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import msgspec


@dataclass
class Completion:
    """Times are `time.perf_counter()` seconds."""

    started: float
    content_times: list[float] = field(default_factory=list)  # when each piece of text came
    ended: float = 0.0
    prompt_tokens: int | None = None  # None: the server reports no usage
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """By the server's count; a piece of text counts as one token where it gives none."""
        if self.completion_tokens is None:
            return len(self.content_times)
        return self.completion_tokens


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Choice(msgspec.Struct):
    text: str = ""


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


_chunk_decoder = msgspec.json.Decoder(Chunk)


async def stream_completion(client: httpx.AsyncClient, body: dict[str, object]) -> Completion:
    """Post `body` to the completions endpoint and read the stream to its end. Never raises."""
    completion = Completion(started=time.perf_counter())
    try:
        async with client.stream("POST", "completions", json=body) as response:
            if response.is_success:
                await _read_stream(response, completion)
            else:
                text = (await response.aread()).decode(errors="replace")
                completion.error = f"HTTP {response.status_code}: {text[:300]}"
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        completion.error = f"{type(error).__name__}: {error}"
    completion.ended = time.perf_counter()
    return completion


async def _read_stream(response: httpx.Response, completion: Completion) -> None:
    finished = False
    async for data in _events(response):
        now = time.perf_counter()
        if data == b"[DONE]":
            finished = True  # and read on: only a body read to its end keeps the connection alive
            continue
        chunk = _chunk_decoder.decode(data)
        if chunk.error is not None:
            completion.error = f"in the stream: {chunk.error}"
            return
        if chunk.choices and chunk.choices[0].text:
            completion.content_times.append(now)
        if chunk.usage is not None:
            _note_usage(completion, chunk.usage)
    if not finished:
        completion.error = "the stream ended without [DONE]"


def _note_usage(completion: Completion, usage: Usage) -> None:
    completion.prompt_tokens = usage.prompt_tokens
    completion.completion_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        completion.cached_tokens = usage.prompt_tokens_details.cached_tokens


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Bytes throughout: text lines cost the client more CPU."""
    buffer = b""
    async for received in response.aiter_bytes():
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
