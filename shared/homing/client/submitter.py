"""Submitter: puts a request's attempts on their way, each with the hashes of its prompt's blocks.

The hashes of a long prompt take milliseconds. They are made in a thread, and the attempt is sent
when they are there; meanwhile the event loop serves other streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from homing.client.generation import TOKEN_BYTES, Generation
from homing.client.session import Session
from homing.wire import Submit

LONG_PROMPT_BYTES = 4096 * TOKEN_BYTES
"""Shorter ones are hashed on the loop, in a third of a millisecond at most."""

Hashes = bytes | None
"""At the prompt's routing points; None where the policy reads none."""


class Submitter:
    """Owned by one client, whose session it sends over."""

    def __init__(self, session: Session, wait: Callable[[Generation], None]) -> None:
        """wait: is given an attempt that cannot be sent now, because a session is being begun."""
        self._session = session
        self._wait = wait
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-hashes")
        self._hashing: dict[int, asyncio.Future[Hashes]] = {}  # request id -> of its attempt

    def send(self, generation: Generation) -> None:
        """Submit the generation's present attempt, at once or soon, in place of any earlier one."""
        self.withdraw(generation)
        fleet, tokens = self._session.fleet, generation.tokens
        hashes = partial(fleet.routing_hashes, tokens, generation.cache_salt)
        if not fleet.reads_prefixes or len(tokens) < LONG_PROMPT_BYTES:
            self._send(generation, tokens, hashes())
            return
        future = asyncio.get_running_loop().run_in_executor(self._thread, hashes)
        self._hashing[generation.request_id] = future
        future.add_done_callback(partial(self._on_hashed, generation, tokens))

    def withdraw(self, generation: Generation) -> bool:
        """Whether the present attempt was not sent yet; then it never will be."""
        future = self._hashing.pop(generation.request_id, None)
        if future is None:
            return False
        future.cancel()
        return True

    async def flush(self) -> None:
        """Until what was submitted by now is sent, for a message that has to come after it."""
        if self._hashing:
            await asyncio.wait(list(self._hashing.values()))

    def close(self) -> None:
        """Send nothing any more. Idempotent."""
        for future in self._hashing.values():
            future.cancel()
        self._hashing.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _on_hashed(
        self, generation: Generation, tokens: bytes, future: asyncio.Future[Hashes]
    ) -> None:
        if self._hashing.get(generation.request_id) is future:
            del self._hashing[generation.request_id]
            self._send(generation, tokens, future.result())

    def _send(self, generation: Generation, tokens: bytes, hashes: Hashes) -> None:
        if not self._session.welcomed:
            self._wait(generation)
            return
        self._session.send(
            Submit(
                client=self._session.uid,
                request_id=generation.request_id,
                attempt=generation.attempt,
                num_prompt_tokens=len(tokens) // TOKEN_BYTES,
                num_resumed_tokens=generation.num_resumed_tokens,
                max_new_tokens=generation.max_new_tokens,
                cache_salt=generation.cache_salt,
                external_digest=generation.external_digest,
                priority=generation.priority,
                deadline_s=generation.remaining_s(self._session.now()),
                tenant=generation.tenant,
                prompt=tokens,
                sampling=generation.params.to_bytes(),
                block_hashes=hashes,
            )
        )
