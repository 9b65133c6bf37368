"""One request as its consumer sees it: a stream of parts that ends exactly once.

A `Generation` outlives the attempts that serve it. It keeps every token received, so that when an
engine dies the client can submit prompt + tokens again, and the consumer sees neither a gap nor a
repeat. Knows nothing of sockets: the client feeds it and sends for it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import msgspec
from msgspec import Struct

from homing.errors import ContextLengthExceeded, HomingError, InternalError, InvalidRequest
from homing.params import SamplingParams
from homing.prefix import TOKEN_BYTES
from homing.transport import Loan
from homing.wire import FAILED, Delta, Finish, FinishReason, TopLogProbs

Alternatives = list[tuple[int, float]]
"""(token id, log-probability) of the most probable tokens at one position, best first."""


class Part(Struct, frozen=True):
    """What one step brought. The last part of a stream, and no other, has `finish`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    top: list[Alternatives] | None = None
    num_cached_tokens: int | None = None
    """On the first part: prompt tokens that were found in the cache."""
    prompt_log_probs: list[float | None] | None = None
    """On the first part, when asked for; the first token has none."""
    prompt_top: Iterable[Alternatives | None] | None = None
    """Likewise. To be iterated away from an event loop where the prompt is long."""
    epoch: int = 0
    """Weight epoch under which the tokens were sampled."""
    finish: Finish | None = None

    def can_take(self, later: Part) -> bool:
        """Whether the two can be one part and lose nothing."""
        return (
            self.finish is None
            and self.epoch == later.epoch
            and (self.log_probs is None) == (later.log_probs is None)
            and (self.top is None) == (later.top is None)
            and later.num_cached_tokens is None
            and later.prompt_log_probs is None
        )

    def joined(self, later: Part) -> Part:
        """This part and the next one of the stream as one; this one's lists become its own."""
        self.token_ids.extend(later.token_ids)
        if self.log_probs is not None and later.log_probs is not None:
            self.log_probs.extend(later.log_probs)
        if self.top is not None and later.top is not None:
            self.top.extend(later.top)
        return msgspec.structs.replace(self, finish=later.finish)


class Generation:
    """An async iterator of `Part`s. Raises one of Homing's errors instead of ending when it
    fails. Who wants the parts without a task of their own follows it."""

    def __init__(
        self,
        request_id: int,
        prompt: bytes,
        params: SamplingParams,
        *,
        cache_salt: str,
        external_digest: int | None,
        num_resumed_tokens: int = 0,
        max_new_tokens: int,
        priority: int = 0,
        deadline: float | None = None,
        tenant: int | None = None,
        send_abort: Callable[[Generation], None],
        forget: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self.attempt = 0
        self.engine_deaths = 0
        """Attempts that ended because their engine died."""
        self.cache_salt = cache_salt
        self.external_digest = external_digest
        self.priority = priority
        self.deadline = deadline
        """By the clock of the client's event loop."""
        self.tenant = tenant
        self.abort_asked = False
        self.loan: Loan | None = None
        """The prompt of the present attempt, where it is lent and may not have been read yet."""
        self.homeless_since: float | None = None
        """When it last went on, if no rank is at work on it since."""
        self._prompt = prompt
        self._params = params
        self._num_resumed_before = num_resumed_tokens
        self._max_new_tokens = max_new_tokens
        self._received = bytearray()  # tokens of all attempts, uint32
        self._has_first_part = False
        self._parts: asyncio.Queue[Part | HomingError] = asyncio.Queue()
        self._give: Callable[[Part | HomingError], None] = self._parts.put_nowait
        self._ended = False
        self._consumed = False
        self._send_abort = send_abort
        self._forget = forget

    # What the client sends for each attempt

    @property
    def tokens(self) -> bytes:
        """Prompt and what was generated so far, uint32."""
        return self._prompt + bytes(self._received) if self._received else self._prompt

    @property
    def num_resumed_tokens(self) -> int:
        return self._num_resumed_before + len(self._received) // TOKEN_BYTES

    @property
    def max_new_tokens(self) -> int:
        """Tokens yet to come at most."""
        return self._max_new_tokens - len(self._received) // TOKEN_BYTES

    @property
    def seed(self) -> int | None:
        """Of the noise; drawn by the client where the parameters left it open."""
        return self._params.seed

    def remaining_s(self, now: float) -> float | None:
        """Until its deadline; None: it has none."""
        return None if self.deadline is None else max(0.0, self.deadline - now)

    @property
    def params(self) -> SamplingParams:
        """The parameters of the next attempt: what was delivered once is not asked for again."""
        if self._has_first_part and self._params.wants_prompt_log_probs:
            return msgspec.structs.replace(self._params, skip_prompt_log_probs=True)
        return self._params

    # What the client feeds

    def receive(self, delta: Delta) -> None:
        """Take a delta of the current attempt; one of another attempt, or after the end, is
        dropped."""
        if self._ended or delta.attempt != self.attempt:
            return
        if self.loan:
            self.loan.returned()
            self.loan = None
        if delta.finish is not None and delta.finish.reason in FAILED:
            self.fail(_error_of(delta.finish))
            return
        self.homeless_since = None
        self._received += delta.tokens
        self._give(_part(delta, first=not self._has_first_part))
        self._has_first_part = True
        if delta.finish is not None:
            self._end()

    def fail(self, error: HomingError) -> None:
        """End with an error; nothing happens when it has ended already."""
        if not self._ended:
            self._give(error)
            self._end()

    def end_aborted(self, detail: str = "") -> None:
        """End as aborted without an engine's word: none is at work on it, or none answers."""
        if not self._ended:
            finish = Finish(FinishReason.ABORT, detail=detail)
            self._give(Part(token_ids=[], finish=finish))
            self._end()

    # What the consumer calls

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Part:
        if self._consumed:
            raise StopAsyncIteration
        part = await self._parts.get()
        if isinstance(part, HomingError):
            self._consumed = True
            raise part
        self._consumed = part.finish is not None
        return part

    def follow(self, take: Callable[[Part | HomingError], None]) -> None:
        """Instead of iterating: have `take` called with what has come and with what comes, from the
        event loop, up to the last part or the error."""
        self._give = take
        while not self._parts.empty():
            take(self._parts.get_nowait())

    async def abort(self) -> None:
        """Ask for the end now: the stream ends with what was generated and reason `abort`."""
        if not self._ended and not self.abort_asked:
            self.abort_asked = True
            self._send_abort(self)

    def cancel(self) -> None:
        """Abort, and want nothing more: for a consumer that left. Does nothing after the end."""
        if not self._ended:
            self._send_abort(self)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self.loan = None
        self._forget(self)


def external_digest(external_id: str) -> int:
    """63 bits of a request's name outside."""
    return int.from_bytes(blake2b(external_id.encode(), digest_size=8).digest()) >> 1


def _error_of(finish: Finish) -> HomingError:
    if "maximum context length" in finish.detail:
        return ContextLengthExceeded(finish.detail, field=finish.field or None)
    if finish.field:
        return InvalidRequest(finish.detail, field=finish.field)
    return InternalError(finish.detail)


def _part(delta: Delta, *, first: bool) -> Part:
    prompt = delta.prompt if first else None
    return Part(
        token_ids=_uint32(delta.tokens),
        log_probs=None if delta.log_probs is None else _float32(delta.log_probs),
        top=None if delta.top is None else list(_alternatives(delta.top)),
        num_cached_tokens=delta.num_cached_tokens if first else None,
        prompt_log_probs=None if prompt is None else [None, *_float32(prompt.log_probs)],
        prompt_top=None if prompt is None or prompt.top is None else _PromptTop(prompt.top),
        epoch=delta.epoch,
        finish=delta.finish,
    )


@dataclass(frozen=True, slots=True)
class _PromptTop:
    """Of a prompt's tokens, read from the wire as often as it is iterated."""

    top: TopLogProbs

    def __iter__(self) -> Iterator[Alternatives | None]:
        yield None  # nothing predicts the first
        yield from _alternatives(self.top)


def _alternatives(top: TopLogProbs) -> Iterator[Alternatives]:
    """At one position after the other."""
    pairs = zip(array("I", top.token_ids), array("f", top.log_probs), strict=True)
    while entry := list(islice(pairs, max(1, top.n))):
        yield entry


def _uint32(data: bytes) -> list[int]:
    return array("I", data).tolist()


def _float32(data: bytes) -> list[float]:
    return array("f", data).tolist()
