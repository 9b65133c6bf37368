"""Engine: requests in, tokens out, one step at a time. Knows nothing of sockets or clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from homing.engine.deadlines import Deadlines
from homing.engine.endings import (
    finish_after,
    finish_of_grammar,
    finished_before_start,
    grammar_failure,
)
from homing.engine.foresight import next_decodes, placement_of_next
from homing.engine.intake import Intake
from homing.engine.kv_cache import KVCache
from homing.engine.kv_offload import KVOffload
from homing.engine.lifecycle import Lifecycle
from homing.engine.limits import EngineLimits
from homing.engine.log_probs import LogProbs
from homing.engine.models import Model
from homing.engine.parts import EngineParts
from homing.engine.plan import StepLoad, StepPlan
from homing.engine.request import Change, Phase, Request, RequestKey
from homing.engine.sampling import Sampled
from homing.engine.scheduler import SchedulerLimits
from homing.engine.stats import QUEUE_TIMES_S, EngineCounters, EngineStats
from homing.engine.structured.compiler import GrammarCompiler
from homing.engine.structured.grammar import CompiledGrammar
from homing.errors import Overloaded
from homing.observe import Histogram
from homing.params import SamplingParams
from homing.params.structured import invalid
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason

DEADLINE_PASSED = "its deadline passed"


class RequestOutput(NamedTuple):
    """What one step brought for one request."""

    request: Request
    token_ids: list[int]
    epoch: int
    """Under whose weights they were sampled."""
    log_probs: LogProbs | None = None
    """Of `token_ids`, when asked for."""
    prompt_log_probs: LogProbs | None = None
    """Of prompt tokens `[1, n)`, on the first output, when asked for."""
    is_first: bool = False
    finish: Finish | None = None


class StepInFlight(NamedTuple):
    """A step whose logits the device computes."""

    plan: StepPlan
    load: StepLoad
    started: float
    logits: Tensor


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
        parts: EngineParts | None = None,
    ) -> None:
        """tokenizer: needed for stop words only; grammars: for structured output only; parts: in
        place of the usual ones."""
        parts = parts or EngineParts()
        self.limits = limits
        self.wake: Callable[[], None] = lambda: None
        """Called on another thread when there is work again without a call from here."""
        self.counters = EngineCounters()
        self.queue_time = Histogram("request_queue_time_seconds", QUEUE_TIMES_S)
        """From `add_request` to the first step with a part of the request."""
        self.block_pool = parts.block_pool(limits.num_blocks)
        self.block_pool.eviction = limits.eviction
        self.scheduler = parts.scheduler(
            self.block_pool,
            limits.block_size,
            SchedulerLimits(
                limits.max_batch_requests, limits.max_step_tokens, limits.chunked_prefill
            ),
        )
        if limits.preemption == "offload":
            self.scheduler.offload = KVOffload(cache, self.block_pool.capacity)
        self._intake = Intake(model.shape, limits, tokenizer)
        self.runner = parts.runner(model, cache, limits.block_size, parts.sampler)
        self.lifecycle = Lifecycle(self.scheduler, self.block_pool, self.runner, self.abort_all)
        self._grammars = grammars
        self._compiling: dict[RequestKey, Future[CompiledGrammar]] = {}
        self._requests: dict[RequestKey, Request] = {}
        self._deadlines = Deadlines()
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
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Take a request on. `key` is in use until the request finished.

        prompt: token ids, those that an earlier attempt generated included.
        num_resumed: how many of the last tokens of `prompt` those are.
        max_new_tokens: in this attempt; None: what `sampling` and the context allow.
        priority: lower is sooner.
        deadline: by the clock of `expire`.

        Raises InvalidRequest (what it asks cannot be served) and Overloaded (the queue is full).
        """
        assert key not in self._requests, f"request {key} is running"
        if sampling.structured_output is not None and self._grammars is None:
            raise invalid("it needs a tokenizer, and there is none")
        if len(self.scheduler.waiting) >= self.limits.max_queued_requests:
            raise Overloaded(f"{self.limits.max_queued_requests} requests wait already")
        request = self._intake.request(
            key,
            prompt,
            sampling,
            num_resumed=num_resumed,
            max_new_tokens=max_new_tokens,
            priority=priority,
            cache_salt=cache_salt,
            epoch=self.lifecycle.epoch,
        )
        self._requests[key] = request
        request.queued_at = time.perf_counter()
        self.counters.requests_started += 1
        self.counters.prompt_tokens += len(prompt)
        self.scheduler.add(request)
        if deadline is not None:
            self._deadlines.add(request, deadline)
        if sampling.structured_output is not None:
            assert self._grammars is not None
            future = self._compiling[key] = self._grammars.compile(sampling.structured_output)
            future.add_done_callback(lambda _: self.wake())
        if finish := finished_before_start(request):
            self._finish(request, [], finish)

    def abort(self, key: RequestKey) -> None:
        """End a request now, whatever its phase; the next step says so. Unknown ones: ignored."""
        if request := self._requests.get(key):
            self.counters.aborted += 1
            self._finish(request, [], Finish(FinishReason.ABORT))

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed, whatever their phase, as aborted."""
        for request in self._deadlines.passed(now):
            self.counters.aborted += 1
            self._finish(request, [], Finish(FinishReason.ABORT, detail=DEADLINE_PASSED))

    def abort_all(self) -> None:
        for key in list(self._requests):
            self.abort(key)

    def close(self) -> None:
        """Stop the thread and the process that compile grammars, if there are any."""
        if self._grammars:
            self._grammars.close()

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """A step would bring something."""
        if self._outputs or self.scheduler.paused:
            return bool(self._outputs)
        if any(future.done() for future in self._compiling.values()):
            return True
        if self.scheduler.is_closed:
            return self.scheduler.has_ready
        return len(self._requests) > len(self._compiling)

    @property
    def stats(self) -> EngineStats:
        requests = (*self.scheduler.running, *self.scheduler.waiting)
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            owed_tokens=sum(request.num_owed for request in requests),
            kv_used_blocks=self.block_pool.num_held,
            kv_total_blocks=self.block_pool.capacity,
        )

    # The loop's body

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns what it brought, and what ended since the last one."""
        step = self.begin_step()
        self.prepare_next(step)
        self.end_step(step)
        return self.take_outputs()

    def begin_step(self) -> StepInFlight | None:
        """Launch a step; None when there is nothing to run. Until `end_step` new requests may be
        added, outputs be taken and `prepare_next` be called, and nothing else be done: it works on
        the others' blocks."""
        self._take_grammars()
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return None
        start = time.perf_counter()
        self._end_queueing(plan, start)
        load = plan.load  # before the step changes what its requests do
        return StepInFlight(plan, load, start, self.runner.launch(plan))

    def prepare_next(self, step: StepInFlight | None) -> None:
        """While a device computes `step`, get ready for the one that probably follows; nothing on
        a CPU. May be left out."""
        if step is None or not self.runner.overlaps:
            return
        if chunks := next_decodes(step.plan):
            placement = placement_of_next(chunks, self.block_pool, self.limits.block_size)
            if placement is not None:
                self.runner.prepare(chunks, placement)

    def end_step(self, step: StepInFlight | None) -> None:
        """Wait for it, and have its outputs ready to be taken."""
        if step is not None:
            self._update(step.plan, self.runner.collect(step.plan, step.logits))
            self._count(step.load, time.perf_counter() - step.started)
        self.lifecycle.after_step()

    def take_outputs(self) -> list[RequestOutput]:
        """What came about since the last step, without another one."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _end_queueing(self, plan: StepPlan, now: float) -> None:
        for chunk in plan.chunks:
            if chunk.request.queued_at is not None:
                self.queue_time.observe(now - chunk.request.queued_at)
                chunk.request.queued_at = None

    def _take_grammars(self) -> None:
        """Make requests ready whose grammar is compiled, and answer those that cannot have one."""
        done = [(key, future) for key, future in self._compiling.items() if future.done()]
        for key, future in done:
            request = self._requests[key]
            if error := future.exception():
                self._finish(request, [], grammar_failure(error))
                continue
            del self._compiling[key]
            request.grammar = future.result().start(request.generated.tolist())
            if finish := finish_of_grammar(request):
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
        finish = finish_after(request, token)
        if finish:
            self._finish(request, [token], finish, log_probs)
        else:
            if request.phase is Phase.PREFILL:
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
            RequestOutput(
                request,
                token_ids,
                self.lifecycle.epoch,
                log_probs,
                prompt_log_probs,
                is_first,
                finish,
            )
        )

    def _count(self, load: StepLoad, seconds: float) -> None:
        counters = self.counters
        counters.steps += 1
        counters.preemptions = self.scheduler.num_preemptions
        counters.prefilled_tokens += load.prefill_tokens
        counters.prefilled_pairs += load.prefill_pairs
        counters.decode_rows += load.decode_rows
        counters.decode_context_tokens += load.decode_context_tokens
        if load.prefill_tokens:
            counters.prefill_step_s += seconds
        else:
            counters.decode_step_s += seconds
