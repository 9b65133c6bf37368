"""The one thread that encodes prompts and renders chats, away from the event loop.

A long prompt takes it a while; meanwhile other streams go on, since text for them is decoded on the
loop with a tokenizer of its own. A short text is encoded there, too: to hand it over would take the
loop longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from homing.errors import ContextLengthExceeded, Overloaded
from homing.tokenizer import Tokenizer

SHORT_PROMPT = 1024
"""Characters, or token ids, that are encoded on the event loop: less than half a millisecond."""
MAX_WAITING = 1024
"""Jobs that may wait for the thread; more are refused."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to be submitted."""

    token_ids: list[int]
    text: str | None = None
    """As the client wrote it; None if it came as ids."""
    end: str = ""
    """The last characters of a rendered chat."""
    request_id: str | None = None
    """Its own name for /abort, where a request has several prompts."""


class TokenizerThread:
    """Runs jobs one at a time on a tokenizer that nobody else uses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._num_waiting = 0

    async def run(self, job: Callable[[Tokenizer], T]) -> T:
        """The job's result. A caller that is cancelled takes a job that has not begun with it."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} prompts wait to be tokenized; that is the limit")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, job, self._tokenizer)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


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
