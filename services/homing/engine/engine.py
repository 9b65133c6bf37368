"""Engine: requests in, tokens out, one step at a time. Knows nothing of sockets or clients."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from homing.engine.block_pool import BlockPool
from homing.engine.kv_cache import KVCache
from homing.engine.limits import EngineLimits
from homing.engine.log_probs import LogProbs
from homing.engine.models import Model
from homing.engine.plan import StepPlan
from homing.engine.request import Change, Request, RequestKey
from homing.engine.runner import Runner
from homing.engine.sampling import Sampled
from homing.engine.scheduler import Scheduler, SchedulerLimits
from homing.engine.stop_words import StopWords
from homing.engine.structured.compiler import GrammarCompiler
from homing.engine.structured.grammar import CompiledGrammar
from homing.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from homing.params import SamplingParams
from homing.params.structured import invalid
from homing.prefix import prefix_salt
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one request."""

    request: Request
    token_ids: list[int]
    log_probs: LogProbs | None = None
    """Of `token_ids`, when asked for."""
    prompt_log_probs: LogProbs | None = None
    """Of prompt tokens `[1, n)`, on the first output, when asked for."""
    is_first: bool = False
    finish: Finish | None = None


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine was made; none of them ever falls."""

    requests_started: int = 0
    requests_finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the cache when their request was first admitted
    prefilled_tokens: int = (
        0  # tokens computed in prefill chunks, those after a preemption included
    )
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_step_s: float = 0.0  # time of steps with a prefill chunk
    decode_step_s: float = 0.0  # time of steps without


class Engine:
    """One model, its KV cache and the requests that share them. For one thread.

    A caller adds requests and calls `step` while `has_work`; each request's outputs end with
    exactly one that has `finish` set.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """tokenizer: needed for stop words only; grammars: for structured output only."""
        self.limits = limits
        self.wake: Callable[[], None] = lambda: None
        """Called on another thread when there is work again without a call from here."""
        self.epoch = 0
        self.counters = EngineCounters()
        self.block_pool = BlockPool(limits.num_blocks)
        self.scheduler = Scheduler(
            self.block_pool,
            limits.block_size,
            SchedulerLimits(limits.max_batch_requests, limits.max_step_tokens),
        )
        self._shape = model.shape
        self._runner = Runner(model, cache, limits.block_size)
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._compiling: dict[RequestKey, Future[CompiledGrammar]] = {}
        self._requests: dict[RequestKey, Request] = {}
        self._outputs: list[RequestOutput] = []  # those that the next step returns besides its own

    # Requests

    def add_request(
        self,
        key: RequestKey,
        prompt: NDArray[np.integer],
        sampling: SamplingParams,
        *,
        num_resumed: int = 0,
        max_new_tokens: int | None = None,
        cache_salt: str = "",
    ) -> None:
        """Take a request on. `key` is in use until the request finished.

        prompt: token ids, those that an earlier attempt generated included.
        num_resumed: how many of the last tokens of `prompt` those are.
        max_new_tokens: in this attempt; None: what `sampling` and the context allow.

        Raises InvalidRequest (what it asks cannot be served) and Overloaded (the queue is full).
        """
        assert key not in self._requests, f"request {key} is running"
        self._check(prompt, sampling, num_resumed)
        if len(self.scheduler.waiting) >= self.limits.max_queued_requests:
            raise Overloaded(f"{self.limits.max_queued_requests} requests wait already")
        request = self._request(
            key,
            prompt,
            sampling,
            num_resumed=num_resumed,
            max_new_tokens=max_new_tokens,
            salt=cache_salt,
        )
        self._requests[key] = request
        self.counters.requests_started += 1
        self.counters.prompt_tokens += len(prompt)
        self.scheduler.add(request)
        if sampling.structured_output is not None:
            assert self._grammars is not None
            future = self._compiling[key] = self._grammars.compile(sampling.structured_output)
            future.add_done_callback(lambda _: self.wake())
        if finish := _finished_before_start(request):
            self._finish(request, [], finish)

    def abort(self, key: RequestKey) -> None:
        """End a request now, whatever its phase; the next step's outputs say so. Unknown:
        ignored."""
        if request := self._requests.get(key):
            self.counters.aborted += 1
            self._finish(request, [], Finish(FinishReason.ABORT))

    def abort_all(self) -> None:
        for key in list(self._requests):
            self.abort(key)

    def close(self) -> None:
        """Stop the thread and the process that compile grammars, if there are any."""
        if self._grammars:
            self._grammars.close()

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """A step would bring something."""
        if self._outputs or self.scheduler.paused:
            return bool(self._outputs)
        some_ready = len(self._requests) > len(self._compiling)
        return some_ready or any(future.done() for future in self._compiling.values())

    # Control

    def pause(self) -> None:
        """Run no request until `unpause`; what is there stays, and what comes waits."""
        self.scheduler.paused = True

    def unpause(self) -> None:
        self.scheduler.paused = False

    def reset_prefix_cache(self) -> int:
        """Forget every prefix. Returns how many blocks were in the index."""
        return self.scheduler.clear_prefix_cache()

    # The loop's body

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns what it brought, and the ends that came about since the last
        one."""
        self._take_grammars()
        plan = self.scheduler.schedule()
        if plan.chunks:
            start = time.perf_counter()
            num_prefill_tokens = plan.num_prefill_tokens
            self._update(plan, self._runner.run(plan))
            self._count(num_prefill_tokens, time.perf_counter() - start)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_grammars(self) -> None:
        """Make requests ready whose grammar is compiled, and answer those that cannot have one."""
        done = [(key, future) for key, future in self._compiling.items() if future.done()]
        for key, future in done:
            request = self._requests[key]
            if error := future.exception():
                self._finish(request, [], _grammar_failure(error))
                continue
            del self._compiling[key]
            request.grammar = future.result().start(request.generated.tolist())
            if finish := _finish_of_grammar(request):
                self._finish(request, [], finish)

    def _update(self, plan: StepPlan, sampled: Sampled) -> None:
        row = 0
        for chunk in plan.chunks:
            request = chunk.request
            self.scheduler.computed(chunk)
            if chunk.samples:
                token = sampled.token_ids[row]
                self._append(request, token, sampled.log_probs[row])
                row += 1
            elif chunk.end == request.num_tokens:
                self._finish(request, [], Finish(FinishReason.LENGTH))

    def _append(self, request: Request, token: int, log_probs: LogProbs | None) -> None:
        request.append(token)
        self.counters.generated_tokens += 1
        finish = _finish_after(request, token)
        if finish:
            self._finish(request, [token], finish, log_probs)
        else:
            request.change(Change.SAMPLE)
            self._put_out(request, [token], log_probs)

    def _finish(
        self,
        request: Request,
        token_ids: list[int],
        finish: Finish,
        log_probs: LogProbs | None = None,
    ) -> None:
        self.scheduler.finish(request)
        del self._requests[request.key]
        self._compiling.pop(request.key, None)
        self.counters.requests_finished += 1
        self._put_out(request, token_ids, log_probs, finish)

    def _put_out(
        self,
        request: Request,
        token_ids: list[int],
        log_probs: LogProbs | None,
        finish: Finish | None = None,
    ) -> None:
        is_first = not request.has_answered
        request.has_answered = True
        prompt_log_probs = None
        if is_first:
            self.counters.cached_tokens += request.num_cached_at_start or 0
            if request.sampling.wants_prompt_log_probs and request.prompt_scores.complete:
                prompt_log_probs = request.prompt_scores.take()
        self._outputs.append(
            RequestOutput(request, token_ids, log_probs, prompt_log_probs, is_first, finish)
        )

    def _count(self, num_prefill_tokens: int, seconds: float) -> None:
        counters = self.counters
        counters.steps += 1
        counters.preemptions = self.scheduler.num_preemptions
        counters.prefilled_tokens += num_prefill_tokens
        if num_prefill_tokens:
            counters.prefill_step_s += seconds
        else:
            counters.decode_step_s += seconds

    # From what is asked to a request

    def _check(
        self, prompt: NDArray[np.integer], sampling: SamplingParams, num_resumed: int
    ) -> None:
        limit = self.limits.max_context_tokens
        generates = sampling.num_tokens_to_generate != 0 and not num_resumed
        if not len(prompt):
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        if num_resumed >= len(prompt):
            raise InvalidRequest("all tokens are resumed ones; none is a prompt", field="prompt")
        if len(prompt) + generates > limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt):,} tokens; the model's maximum context length is "
                f"{limit:,} tokens, the answer included",
                field="prompt",
            )
        for token in (int(prompt.min()), int(prompt.max())):
            if not 0 <= token < self._shape.vocab_size:
                raise InvalidRequest(
                    f"token id {token} is not in the vocabulary of {self._shape.vocab_size}",
                    field="prompt",
                )
        sampling.check_vocabulary(self._shape.vocab_size)
        if sampling.stop_words and self._tokenizer is None:
            raise InvalidRequest(
                "stop words need a tokenizer, and there is none", field="stop_words"
            )
        if sampling.structured_output is not None and self._grammars is None:
            raise invalid("it needs a tokenizer, and there is none")

    def _request(
        self,
        key: RequestKey,
        prompt: NDArray[np.integer],
        sampling: SamplingParams,
        *,
        num_resumed: int,
        max_new_tokens: int | None,
        salt: str,
    ) -> Request:
        room = self.limits.max_context_tokens - len(prompt)
        if sampling.num_tokens_to_generate is not None:
            room = min(room, sampling.num_tokens_to_generate - num_resumed)
        if max_new_tokens is not None:
            room = min(room, max_new_tokens)
        stop_words = None
        if sampling.stop_words:
            assert self._tokenizer is not None
            original = prompt[: len(prompt) - num_resumed].tolist()
            stop_words = StopWords(self._tokenizer, original, sampling.stop_words)
        eos = () if sampling.ignore_eos else self._shape.eos_token_ids
        return Request(
            key,
            prompt.astype(np.int32),
            sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            block_size=self.limits.block_size,
            max_new_tokens=max(0, room),
            num_resumed=num_resumed,
            salt=prefix_salt(epoch=self.epoch, cache_salt=salt),
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            stop_words=stop_words,
        )


def _finished_before_start(request: Request) -> Finish | None:
    """The end of a request for which no token need be computed."""
    resumed = request.generated.tolist()
    if resumed and (word := request.stop_words and request.stop_words.push(resumed)):
        return Finish(FinishReason.STOP, stop=word)
    if not request.generates and not request.scores_prompt:
        return Finish(FinishReason.LENGTH)
    return None


def _finish_after(request: Request, token: int) -> Finish | None:
    """Whether its newest token ends a request, and how. An end of sequence at the limit is a
    stop."""
    if request.grammar:
        request.grammar.accept(token)
        if finish := _finish_of_grammar(request):
            return finish
    if token in request.stop_token_ids:
        return Finish(FinishReason.STOP, stop=token)
    if request.stop_words and (word := request.stop_words.push([token])):
        return Finish(FinishReason.STOP, stop=word)
    if request.num_tokens == request.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None


def _finish_of_grammar(request: Request) -> Finish | None:
    """Whether its grammar ends a request: nothing can follow, or no token could be chosen."""
    assert request.grammar is not None
    if request.grammar.error:
        return _grammar_failure(invalid(request.grammar.error))
    if request.grammar.finished:
        return Finish(FinishReason.STOP, stop=int(request.tokens[-1]))
    return None


def _grammar_failure(error: BaseException) -> Finish:
    if isinstance(error, InvalidRequest):
        return Finish(FinishReason.ERROR, detail=str(error), field=error.field or "")
    log.error("a grammar could not be compiled", exc_info=error)
    return Finish(FinishReason.ERROR, detail="the grammar could not be compiled")
