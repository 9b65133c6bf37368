"""SimulatedRank: an engine that only keeps time.

It has a paged KV cache with prefix reuse, admits requests first come first served while their
tokens fit, computes prompts in chunks mixed with the decodes of those that run, and takes for each
step what `StepCost` says. Its figures are assumed ones for a dense model of 8 billion weights on
one accelerator of 140 GB: they are the same for all policies, which is what a comparison needs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from homing.bench.replay.block_cache import BlockCache
from homing.bench.replay.workload import Turn
from homing.coordinator.backlog import RankReport
from homing.coordinator.router import Decision
from homing.coordinator.step_model import StepSums

CHUNK_TOKENS = 2048
"""Prompt tokens computed in one step, at most."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step."""

    base: float = 6e-3
    row: float = 40e-6
    """Each request that decodes."""
    kv: float = 40e-9
    """Each token of their context."""
    prefill: float = 45e-6
    """Each prompt token computed."""
    attention: float = 1.3e-9
    """Each pair of a prompt token computed and a token before it."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on a rank."""

    turn: Turn
    place: tuple[int, int]
    """Its session and its turn's number."""
    decision: Decision
    arrived: float
    num_cached: int = 0
    num_computed: int = 0
    first_token: float = 0.0
    finished: float = 0.0
    private_tokens: int = 0
    """Tokens that it holds outside of blocks that others may use."""


@dataclass(slots=True)
class StepPlan:
    """The step, or the run of equal steps, that a rank is in."""

    started: float
    ends: float
    num_steps: int = 1
    computed: list[tuple[Job, int]] = field(default_factory=list[tuple[Job, int]])
    """Prompt tokens of each request."""
    pairs: float = 0.0
    """Those tokens, each times the tokens before it."""


class SimulatedRank:
    def __init__(
        self, kv_tokens: int, block_tokens: int, cost: StepCost, *, slowness: float = 1.0
    ) -> None:
        self._cache = BlockCache(kv_tokens, block_tokens)
        self._block_tokens = block_tokens
        self._cost = cost
        self._slowness = slowness
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # heap of (last step, order, job)
        self._order = 0
        self._context_tokens = 0  # of those that decode
        self._num_decode_steps = 0
        self._owed_tokens = 0
        self._computing: set[int] = set()  # first blocks that somebody is computing
        self._sums = [0, 0, 0, 0, 0, 0.0]
        self.step: StepPlan | None = None
        self.busy_s = 0.0

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def report(self) -> RankReport:
        """What it would tell in a heartbeat now: of the steps that are over."""
        return RankReport(self.num_requests, self._owed_tokens, StepSums(*self._sums))

    def submit(self, job: Job, now: float) -> float:
        """Take a request. Returns when the step that the rank is in ends, which may be sooner."""
        job.num_computed = self._usable(self._cache.match(job.turn.block_ids), job.turn)
        self._owed_tokens += job.turn.num_prompt_tokens - job.num_computed
        self._waiting.append(job)
        if self.step is None:
            self._begin(now)
        elif self.step.num_steps > 1:
            self._cut_run(self.step, now)
        assert self.step is not None, "a rank with a request is in a step"
        return self.step.ends

    def end_step(self) -> list[Job]:
        """Finish the step and begin the next. Returns the requests that ended with it."""
        plan = self.step
        assert plan is not None
        self._account(plan)
        self._num_decode_steps += plan.num_steps
        self._context_tokens += len(self._decoding) * plan.num_steps
        finished = self._take_finished(plan.ends)
        for job, num_tokens in plan.computed:
            job.num_computed += num_tokens
            if job.num_computed == job.turn.num_prompt_tokens:
                self._end_prefill(job, plan.ends, finished)
        self._begin(plan.ends)
        return finished

    def _begin(self, now: float) -> None:
        self._admit()
        computed: list[tuple[Job, int]] = []
        budget, pairs = CHUNK_TOKENS, 0.0
        for job in self._prefilling:
            start = job.num_computed
            end = min(job.turn.num_prompt_tokens, start + budget)
            computed.append((job, end - start))
            pairs += 0.5 * (end * end - start * start)
            budget -= end - start
            if not budget:
                break
        if computed:
            cost = self._cost
            seconds = self._run_s(1) + self._slowness * (
                cost.prefill * (CHUNK_TOKENS - budget) + cost.attention * pairs
            )
            self.step = StepPlan(now, now + seconds, 1, computed, pairs)
        elif self._decoding:
            num_steps = self._decoding[0][0] - self._num_decode_steps
            self.step = StepPlan(now, now + self._run_s(num_steps), num_steps)
        else:
            self.step = None

    def _admit(self) -> None:
        """Enough of the waiting to fill a step, in order."""
        owed = sum(job.turn.num_prompt_tokens - job.num_computed for job in self._prefilling)
        while self._waiting and owed < CHUNK_TOKENS:
            job = self._waiting[0]
            turn = job.turn
            num_blocks = self._cache.match(turn.block_ids)
            missing = turn.block_ids[num_blocks:]
            if missing and missing[0] in self._computing:
                return  # once it is computed it will be found
            private = turn.num_prompt_tokens - num_blocks * self._block_tokens
            private += turn.num_output_tokens
            if not self._cache.reserve(turn.block_ids[:num_blocks], private):
                assert not self._cache.is_idle, f"{turn.num_prompt_tokens} tokens never fit"
                return
            self._waiting.popleft()
            self._prefilling.append(job)
            job.private_tokens = private
            job.num_cached = self._usable(num_blocks, turn)
            self._owed_tokens += job.num_computed - job.num_cached
            job.num_computed = job.num_cached
            self._computing.update(missing[:1])
            owed += turn.num_prompt_tokens - job.num_cached

    def _usable(self, num_blocks: int, turn: Turn) -> int:
        """Cached tokens that need not be computed: all but the last, whose logits are wanted."""
        return min(num_blocks * self._block_tokens, turn.num_prompt_tokens - 1)

    def _end_prefill(self, job: Job, now: float, finished: list[Job]) -> None:
        self._prefilling.remove(job)
        new_blocks = job.turn.block_ids[-(-job.num_cached // self._block_tokens) :]
        self._computing.difference_update(new_blocks[:1])
        self._cache.publish(new_blocks)
        job.private_tokens -= len(new_blocks) * self._block_tokens
        job.first_token = now
        if job.turn.num_output_tokens <= 1:
            self._end(job, now)
            finished.append(job)
            return
        self._order += 1
        last_step = self._num_decode_steps + job.turn.num_output_tokens - 1
        heappush(self._decoding, (last_step, self._order, job))
        self._context_tokens += job.turn.num_prompt_tokens + 1

    def _take_finished(self, now: float) -> list[Job]:
        finished: list[Job] = []
        while self._decoding and self._decoding[0][0] <= self._num_decode_steps:
            job = heappop(self._decoding)[2]
            self._context_tokens -= job.turn.num_prompt_tokens + job.turn.num_output_tokens
            self._end(job, now)
            finished.append(job)
        return finished

    def _end(self, job: Job, now: float) -> None:
        job.finished = now
        self._cache.publish(job.turn.answer_ids)
        job.private_tokens -= len(job.turn.answer_ids) * self._block_tokens
        self._cache.release([*job.turn.block_ids, *job.turn.answer_ids], job.private_tokens)

    def _run_s(self, num_steps: int) -> float:
        """Seconds of so many steps of the decodes alone."""
        cost, rows = self._cost, len(self._decoding)
        first = cost.base + cost.row * rows + cost.kv * self._context_tokens
        grown = cost.kv * rows * num_steps * (num_steps - 1) / 2
        return self._slowness * (first * num_steps + grown)

    def _cut_run(self, plan: StepPlan, now: float) -> None:
        """End a run of steps with the step that is under way."""
        elapsed, low, high = now - plan.started, 1, plan.num_steps
        while low < high:
            middle = (low + high) // 2
            if self._run_s(middle) >= elapsed:
                high = middle
            else:
                low = middle + 1
        plan.num_steps, plan.ends = low, plan.started + self._run_s(low)

    def _account(self, plan: StepPlan) -> None:
        rows, steps = len(self._decoding), plan.num_steps
        seconds = plan.ends - plan.started
        self.busy_s += seconds
        num_computed = sum(tokens for _, tokens in plan.computed)
        self._owed_tokens -= num_computed
        self._sums[0] += steps
        self._sums[1] += num_computed
        self._sums[2] += plan.pairs
        self._sums[3] += rows * steps
        self._sums[4] += self._context_tokens * steps + rows * steps * (steps - 1) // 2
        self._sums[5] += seconds
