"""Submitter: puts a request's attempts on their way, each with the hashes of its prompt's blocks.

The hashes of a long prompt take milliseconds. They are made in a thread, where it is lent, too, if
it can be; the attempt is sent when they are there. Meanwhile the event loop serves other streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from homing.client.generation import Generation
from homing.client.session import Session
from homing.prefix import TOKEN_BYTES
from homing.transport import Lender, Loan
from homing.wire import Submit

LONG_PROMPT_BYTES = 4096 * TOKEN_BYTES
"""Shorter ones are prepared on the loop, in a third of a millisecond at most."""


class Prepared(NamedTuple):
    """What goes with a prompt."""

    hashes: bytes | None
    """At its routing points; None where the policy reads none."""
    loan: Loan | None
    """Instead of itself, where it is long and the engines may see it."""


class Submitter:
    """Owned by one client, whose session it sends over."""

    def __init__(
        self, session: Session, wait: Callable[[Generation], None], *, lends: bool
    ) -> None:
        """
        wait: is given an attempt that cannot be sent now, because a session is being begun.
        lends: the engines may see what is lent.
        """
        self._session = session
        self._wait = wait
        self._lender = Lender()
        self.lends = lends
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._preparing: dict[int, asyncio.Future[Prepared]] = {}  # request id -> of its attempt

    def send(self, generation: Generation) -> None:
        """Submit the generation's present attempt, at once or soon, in place of any earlier one."""
        self.withdraw(generation)
        tokens = generation.tokens
        if len(tokens) < LONG_PROMPT_BYTES:
            self._send(generation, tokens, self._prepare(tokens, generation.cache_salt))
            return
        future = asyncio.get_running_loop().run_in_executor(
            self._thread, self._prepare, tokens, generation.cache_salt
        )
        self._preparing[generation.request_id] = future
        future.add_done_callback(partial(self._on_prepared, generation, tokens))

    def withdraw(self, generation: Generation) -> bool:
        """Whether the present attempt was not sent yet; then it never will be."""
        future = self._preparing.pop(generation.request_id, None)
        if future is None:
            return False
        future.cancel()
        return True

    async def flush(self) -> None:
        """Until what was submitted by now is sent, for a message that has to come after it."""
        if self._preparing:
            await asyncio.wait(list(self._preparing.values()))

    def close(self) -> None:
        """Send nothing any more. Idempotent."""
        for future in self._preparing.values():
            future.cancel()
        self._preparing.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, tokens: bytes, cache_salt: str) -> Prepared:
        hashes = self._session.fleet.routing_hashes(tokens, cache_salt)
        return Prepared(hashes, self._lender.lend(tokens) if self.lends else None)

    def _on_prepared(
        self, generation: Generation, tokens: bytes, future: asyncio.Future[Prepared]
    ) -> None:
        if self._preparing.get(generation.request_id) is future:
            del self._preparing[generation.request_id]
            self._send(generation, tokens, future.result())

    def _send(self, generation: Generation, tokens: bytes, prepared: Prepared) -> None:
        if not self._session.welcomed:
            self._wait(generation)
            return
        loan = generation.loan = prepared.loan
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
                lent_at=loan.place if loan else None,
                prompt=None if loan else tokens,
                sampling=generation.params.to_bytes(),
                block_hashes=prepared.hashes,
            )
        )
