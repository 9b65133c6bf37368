"""A stand-in for `homing.client.Client`: it answers from a script, and no engine runs.

A script is a function `(prompt ids, params) -> steps`. A step is a `Part`, an error that ends the
generation, or an `asyncio.Event` to wait for.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from homing.client import FleetView, Part
from homing.client.checks import check_request as check  # the real one
from homing.errors import HomingError, Overloaded, Unavailable
from homing.params import SamplingParams
from homing.wire import Command, Finish, FinishReason, FleetState, ModelCard, RankInfo

Step = Part | HomingError | asyncio.Event
Script = Callable[[list[int], SamplingParams], Iterable[Step]]

STOP = Finish(FinishReason.STOP)
LENGTH = Finish(FinishReason.LENGTH)


def log_prob_of(token_id: int) -> float:
    """What the fake model says of a token, wherever it stands."""
    return -0.5 - token_id / 1024


def parts(
    prompt: Sequence[int],
    params: SamplingParams,
    answer: Sequence[int],
    *,
    finish: Finish | None = None,
    num_cached_tokens: int = 0,
) -> Iterator[Part]:
    """`answer` one token a part, as an engine would give it: cut at the token limit, and with the
    log-probabilities that are asked for."""
    limit = params.num_tokens_to_generate
    if limit is not None and limit <= len(answer):
        answer, finish = answer[:limit], finish if limit == len(answer) and finish else LENGTH
    end = finish or STOP
    first = _first_fields(prompt, params, num_cached_tokens)
    for index, token_id in enumerate(answer):
        last = end if index + 1 == len(answer) else None
        yield Part(token_ids=[token_id], **_scores(params, token_id), **first, finish=last)
        first = {}
    if not answer:
        yield Part(token_ids=[], **first, finish=end)


def says(answer: Sequence[int], **keywords: Any) -> Script:
    """A model that always says the same."""
    return lambda prompt, params: parts(prompt, params, answer, **keywords)


def _first_fields(
    prompt: Sequence[int], params: SamplingParams, num_cached_tokens: int
) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_cached_tokens": num_cached_tokens}
    if params.wants_prompt_log_probs:
        fields["prompt_log_probs"] = [None, *map(log_prob_of, prompt[1:])]
        if params.top_n_logprobs:
            tops = [_top(token_id, params.top_n_logprobs) for token_id in prompt[1:]]
            fields["prompt_top"] = [None, *tops]
    return fields


def _scores(params: SamplingParams, token_id: int) -> dict[str, Any]:
    if not params.return_log_probs:
        return {}
    scores: dict[str, Any] = {"log_probs": [log_prob_of(token_id)]}
    if params.top_n_logprobs:
        scores["top"] = [_top(token_id, params.top_n_logprobs)]
    return scores


def _top(token_id: int, count: int) -> list[tuple[int, float]]:
    """The token itself first, then its successors."""
    return [(token_id + k, log_prob_of(token_id) - k) for k in range(count)]


STATE_AFTER = {
    Command.PAUSE: FleetState.PAUSED,
    Command.UNPAUSE: FleetState.RUNNING,
    Command.SUSPEND: FleetState.SUSPENDED,
    Command.RESUME: FleetState.PAUSED,
}


@dataclass
class FakeGeneration:
    """One submission, and what became of it."""

    prompt: list[int]
    params: SamplingParams
    cache_salt: str
    external_id: str | None
    steps: Iterator[Step]
    num_resumed_tokens: int = 0
    priority: int = 0
    timeout_s: float | None = None
    tenant: int | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    following: asyncio.Task[None] | None = None

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> Part:
        if self.ended:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        for step in self.steps:
            if isinstance(step, asyncio.Event):
                await self._wait(step)
                if self.aborted.is_set():
                    self.ended = True
                    return Part(token_ids=[], finish=Finish(FinishReason.ABORT))
            elif isinstance(step, HomingError):
                self.ended = True
                raise step
            else:
                self.ended = step.finish is not None
                return step
        raise AssertionError("a script must end with a finish or an error")

    async def _wait(self, event: asyncio.Event) -> None:
        waits = [asyncio.create_task(each.wait()) for each in (event, self.closed, self.aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.closed.is_set():
            self.ended = True
            raise Unavailable("the client was closed")

    def follow(self, take: Callable[[Part | HomingError], None]) -> None:
        self.following = asyncio.create_task(self._give_to(take))

    async def _give_to(self, take: Callable[[Part | HomingError], None]) -> None:
        try:
            async for part in self:
                take(part)
        except HomingError as error:
            take(error)

    @property
    def seed(self) -> int:
        return 7 if self.params.seed is None else self.params.seed

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            self.cancelled.set()
            if self.following:
                self.following.cancel()


class FakeClient:
    """The parts of `Client` that a frontend uses."""

    def __init__(
        self,
        tokenizer_dir: str,
        script: Script,
        *,
        max_context_tokens: int = 256,
        vocab_size: int = 300,
        max_inflight: int = 4096,
        knows_model: bool = True,
        joins: bool = True,
    ) -> None:
        card = ModelCard(
            name="fake",
            tokenizer_dir=tokenizer_dir,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            eos_token_ids=(2,),
            block_size=16,
        )
        rank = RankInfo(0, FleetState.RUNNING, live=True)
        self._serving = FleetView(connected=True, live_ranks=1, ranks=[rank], card=card)
        self.fleet = self._serving if knows_model else FleetView(connected=True)
        self.script = script
        self.model_known = asyncio.Event()
        if knows_model:
            self.model_known.set()
        self.joined = asyncio.Event()
        if joins:
            self.joined.set()
        self.submitted: list[FakeGeneration] = []
        self.snapshot: dict[str, Any] = {}
        self.commands: list[tuple[Command, Any]] = []
        self.control_error: HomingError | None = None
        self.drained: list[tuple[int, float]] = []
        self._max_inflight = max_inflight

    @property
    def running(self) -> list[FakeGeneration]:
        return [generation for generation in self.submitted if not generation.ended]

    async def start(self, timeout_s: float = 30.0) -> None:
        await self.joined.wait()

    def first_engine_joins(self) -> None:
        self.fleet = self._serving
        self.model_known.set()

    async def wait_for_model(self, timeout_s: float = 300.0) -> ModelCard:
        await self.model_known.wait()
        assert self.fleet.card is not None
        return self.fleet.card

    def submit(
        self,
        prompt_tokens: bytes,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        external_id: str | None = None,
        num_resumed_tokens: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: int | None = None,
    ) -> FakeGeneration:
        if not self.fleet.live_ranks:
            raise Unavailable("no engine is serving", retry_after_s=2.5)
        if len(self.running) >= self._max_inflight:
            raise Overloaded(f"{self._max_inflight} requests are unfinished; that is the limit")
        assert self.fleet.card is not None
        prompt = list(struct.unpack(f"<{len(prompt_tokens) // 4}I", prompt_tokens))
        check(prompt_tokens, params, cache_salt, self.fleet.card)
        steps = iter(self.script(prompt, params))
        generation = FakeGeneration(prompt, params, cache_salt, external_id, steps)
        generation.num_resumed_tokens = num_resumed_tokens
        generation.priority, generation.timeout_s = priority, timeout_s
        generation.tenant = tenant
        self.submitted.append(generation)
        return generation

    async def abort_matching(self, external_id: str | None) -> int:
        named = [g for g in self.running if external_id in (None, g.external_id)]
        for generation in named:
            generation.aborted.set()
        return len(named)

    async def control(
        self, command: Command, arguments: Any = None, *, timeout_s: float = 60.0
    ) -> dict[int, dict[str, Any]]:
        if self.control_error:
            raise self.control_error
        self.commands.append((command, arguments))
        if command in STATE_AFTER:
            self.fleet = replace(self.fleet, state=STATE_AFTER[command])
        return {0: {"unfinished_requests": len(self.running)}}

    async def drain(self, rank: int, *, timeout_s: float = 30.0) -> None:
        if self.control_error:
            raise self.control_error
        self.drained.append((rank, timeout_s))

    async def stats(self) -> dict[str, Any]:
        if not self.fleet.connected:
            raise Unavailable("the coordinator does not answer")
        return self.snapshot

    async def close(self) -> None:
        for generation in self.running:
            generation.closed.set()
