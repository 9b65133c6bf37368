"""Work on whole prompts: where it is done, and what comes of it.

Long prompts have a thread of their own: it takes JSON apart, renders chats, encodes and checks, and
so does it put together what answers tell of a prompt's every token. Meanwhile other streams go on.
Short ones are worked on on the event loop: to hand them over would take it longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from homing.errors import ContextLengthExceeded, Overloaded
from homing.tokenizer import Tokenizer

SHORT_BODY = 2048
"""Bytes of a request that is read and encoded on the event loop: it takes half a millisecond."""
MAX_WAITING = 1024
"""Requests that may wait for the thread; more are refused."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to be submitted."""

    token_ids: list[int]
    packed: bytes
    """The ids as `Client.submit` takes them."""
    text: str | None = None
    """What an answer that echoes the prompt begins with, if one does."""
    end: str = ""
    """The last characters of a rendered chat."""
    request_id: str | None = None
    """Its own name for /abort, where a request has several prompts."""


class TokenizerThread:
    """Prepares requests one at a time; and, beside that, tells long answers, one at a time too."""

    def __init__(self) -> None:
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="long-answers")
        self._num_waiting = 0

    async def prepare(self, job: Callable[[], T]) -> T:
        """What the job makes of a request. Raises `Overloaded` when too many wait. A caller that is
        cancelled takes a job that has not begun with it."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} prompts wait to be tokenized; that is the limit")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._prompts, job)
        finally:
            self._num_waiting -= 1

    async def run(self, job: Callable[[], T]) -> T:
        """The result of a job of an answer's, which is never refused. It may take seconds: no
        prompt waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._answers, job)

    def close(self) -> None:
        for executor in (self._prompts, self._answers):
            executor.shutdown(wait=False, cancel_futures=True)


def encode_within(
    tokenizer: Tokenizer, text: str, max_tokens: int, *, add_special_tokens: bool
) -> list[int]:
    """The text's ids, without the work of encoding a text that is far too long for the model."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest > max_tokens:
        raise ContextLengthExceeded(
            f"the prompt has at least {fewest} tokens; "
            f"the model's maximum context length is {max_tokens} tokens",
            field="prompt",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
