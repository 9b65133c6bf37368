"""Decides which tokens run in the next step.

Continuous batching: each step is filled anew, up to a budget of tokens.

0. Requests are in order of urgency: by priority, and within one by age. If the first that waits
   finds no place, running ones of lower priority are preempted for it.
1. Decodes come first, one token each. Where blocks run out, the least urgent running request is
   preempted: it gives back its blocks and waits, and is computed again later (mostly from the
   prefix cache), or, with `offload`, gets back what was copied elsewhere.
2. Waiting requests are admitted, in order, while there are batch places and blocks for all of
   their tokens. One that does not fit may be passed by younger ones, a bounded number of times.
   One whose next block is being computed for another request waits for it, and then finds it in
   the cache.
3. What is left of the budget goes to prefill chunks, as `share_budget` says.

The most urgent request always advances: it may preempt every other one, and the engine accepts no
request that does not fit the pool alone.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from homing.engine.block_pool import BlockPool
from homing.engine.kv_offload import KVOffload
from homing.engine.plan import Chunk, StepPlan
from homing.engine.request import Change, Phase, Request
from homing.prefix import BlockHash

MAX_PASSES = 64
"""A request that does not fit is passed by so many younger ones; then it is next, whoever waits."""

MAX_REFUSALS = 8
"""Waiting requests tried in vain before a step goes on without more admissions."""

MAX_SCORED_TOKENS = 256
"""Prompt tokens scored in one step: each needs a row of logits as wide as the vocabulary."""

_URGENCY = attrgetter("priority", "arrival")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_batch_requests: int
    """Requests that hold blocks at a time."""
    max_step_tokens: int
    """Tokens of one step; at least one for each request of the batch."""
    chunked_prefill: bool = True
    """A prompt may be read in several steps; else `max_step_tokens` has room for each."""


class Scheduler:
    def __init__(self, pool: BlockPool, block_size: int, limits: SchedulerLimits) -> None:
        assert limits.max_step_tokens >= limits.max_batch_requests
        self.waiting: list[Request] = []  # the most urgent first, like `running`
        self.running: list[Request] = []
        self.paused = False
        self.num_preemptions = 0
        self.offload: KVOffload | None = None
        """Where the keys and values of preempted requests go; None: they are computed again."""
        self._num_arrivals = 0
        self._closed_at: int | None = None  # arrivals from this number on are not admitted
        self._pool = pool
        self._block_size = block_size
        self._limits = limits
        self._computing: dict[BlockHash, Request] = {}  # prompt block -> who will compute it

    # The three steps

    def schedule(self) -> StepPlan:
        """The next step's chunks, none while paused. Their requests hold all blocks they need."""
        plan = StepPlan()
        if self.paused:
            return plan
        self._make_room()
        num_preemptions = self.num_preemptions
        for request in [r for r in self.running if r.phase is Phase.DECODE]:
            if request.phase is Phase.DECODE and self._has_room_for_next(request):
                plan.chunks.append(Chunk.of(request, 1))
        if self.num_preemptions == num_preemptions:  # else it would be admitted again at once
            self._admit()
        self._add_prefills(plan)
        return plan

    def _make_room(self) -> None:
        """Preempt what is of lower priority than the first that waits, as far as that one needs."""
        ready = (r for r in self.waiting if r.is_ready and not self._comes_late(r))
        first = next(ready, None)
        if first is None or not self.running or self.running[-1].priority <= first.priority:
            return
        if self._prefix_owner(first) is not None:
            return  # it has nothing to gain before that is computed
        while self.running and self.running[-1].priority > first.priority:
            if self._has_place(first):
                return
            self._preempt(self.running[-1])

    def _has_place(self, request: Request) -> bool:
        if len(self.running) == self._limits.max_batch_requests:
            return False
        return self._num_new_blocks(request, self._pool.match(request.hashes)) is not None

    def _has_room_for_next(self, request: Request) -> bool:
        """Get the next token's block, if need be from the last; False if that is `request`."""
        if request.num_computed < request.num_blocks * self._block_size:
            return True
        while not self._pool.num_available:
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        request.hold(self._pool.allocate(1, after=int(request.blocks[-1])))
        return True

    def _admit(self) -> None:
        refused: list[Request] = []
        for request in list(self.waiting):
            if len(self.running) == self._limits.max_batch_requests:
                return
            if not request.is_ready or self._comes_late(request) or self._waits_for_prefix(request):
                continue
            if not self._take_blocks(request):
                refused.append(request)
                if request.num_passes >= MAX_PASSES or len(refused) == MAX_REFUSALS:
                    return
                continue
            self.waiting.remove(request)
            insort(self.running, request, key=_URGENCY)
            request.change(Change.ADMIT)
            for passed in refused:
                passed.num_passes += 1

    def _add_prefills(self, plan: StepPlan) -> None:
        prefills = [r for r in self.running if r.phase is Phase.PREFILL]
        if not prefills:
            return
        budget = self._limits.max_step_tokens - len(plan.chunks)
        is_chunked = self._limits.chunked_prefill
        if not is_chunked and prefills[0].num_owed > budget:
            plan.chunks.clear()  # beside decodes it would never fit: this step is the prompts'
            budget = self._limits.max_step_tokens
        owed: list[int] = []
        scorable = MAX_SCORED_TOKENS
        for request in prefills:
            owed.append(
                min(request.num_owed, scorable) if request.scores_prompt else request.num_owed
            )
            scorable -= owed[-1] if request.scores_prompt else 0
        shares = share_budget(owed, budget) if is_chunked else whole_prompts(owed, budget)
        for request, num_tokens in zip(prefills, shares, strict=True):
            if num_tokens:
                plan.chunks.append(Chunk.of(request, num_tokens))

    # Blocks

    def _waits_for_prefix(self, request: Request) -> bool:
        """Another request is computing this one's first missing block.

        Only whole blocks that could be taken from the cache count, so nobody waits in vain. And a
        short prompt does not wait for a long one that stands still, behind others.
        """
        owner = self._prefix_owner(request)
        if owner is None:
            return False
        seen, request.owner_seen = request.owner_seen, (owner.arrival, owner.num_computed)
        return seen != request.owner_seen or 2 * request.num_owed > owner.num_owed

    def _prefix_owner(self, request: Request) -> Request | None:
        """Who is computing this one's first missing block, if it does not have it elsewhere."""
        if request.saved_kv is not None:
            return None
        usable = request.max_cached // self._block_size
        missing = next((h for h in islice(request.hashes, usable) if h not in self._pool), None)
        return None if missing is None else self._computing.get(missing)

    def _take_blocks(self, request: Request) -> bool:
        """Give the request blocks for all of its tokens, cached ones where there are; False, and
        nothing changes, if that does not leave one for each running request to go on."""
        pool = self._pool
        cached = pool.match(request.hashes)
        num_new = self._num_new_blocks(request, cached)
        if num_new is None:
            return False
        pool.hold(cached)
        request.hold(cached)
        request.hold(pool.allocate(num_new, after=cached[-1] if cached else None))
        request.num_registered = len(cached)
        request.num_shared_tokens = len(cached) * self._block_size
        request.num_cached = min(request.num_shared_tokens, request.max_cached)
        request.num_computed = request.num_cached
        request.registers_blocks = request.shares_prefix
        self._load_saved(request, len(cached))
        if request.num_cached_at_start is None:
            request.num_cached_at_start = request.num_cached
        for block_hash in request.hashes[len(cached) :]:
            self._computing.setdefault(block_hash, request)
        if pool.journal:
            pool.journal.found(request)
        return True

    def _load_saved(self, request: Request, num_cached_blocks: int) -> None:
        """Copy back what the request had computed before it was preempted, but for what is cached
        or has to be computed again, to be scored."""
        saved = request.saved_kv
        if saved is None or self.offload is None:
            return
        num_tokens = min(saved.num_tokens, request.max_cached)
        if num_tokens > request.num_computed:
            blocks = request.blocks[num_cached_blocks : saved.num_blocks].tolist()
            if blocks:
                self.offload.load(saved, num_cached_blocks, blocks)
            request.num_computed = num_tokens
            request.registers_blocks &= saved.shareable
        self._forget_saved(request)

    def _forget_saved(self, request: Request) -> None:
        if request.saved_kv is not None and self.offload is not None:
            self.offload.drop(request.saved_kv)
            request.saved_kv = None

    def _num_new_blocks(self, request: Request, cached: list[int]) -> int | None:
        """How many it needs beside the cached ones; None if so many are not to be had."""
        num_new = -(-request.num_tokens // self._block_size) - len(cached)
        num_needed = num_new + self._pool.num_cached_among(cached)
        if self.running and num_needed + len(self.running) > self._pool.num_available:
            return None
        return num_new

    def _give_back_blocks(self, request: Request) -> None:
        for block_hash in request.hashes[request.num_registered :]:
            self._stop_computing(block_hash, request)
        self._pool.release(request.drop_blocks())

    def _stop_computing(self, block_hash: BlockHash, request: Request) -> None:
        if self._computing.get(block_hash) is request:
            del self._computing[block_hash]

    # What happens to requests

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self.waiting, request, key=_URGENCY)

    def close(self) -> None:
        """Admit only what is there already, until `open`."""
        if self._closed_at is None:
            self._closed_at = self._num_arrivals

    def open(self) -> None:
        self._closed_at = None

    @property
    def is_closed(self) -> bool:
        return self._closed_at is not None

    @property
    def num_admissible(self) -> int:
        """Requests that are running, or may come to it."""
        return len(self.running) + sum(not self._comes_late(r) for r in self.waiting)

    @property
    def has_ready(self) -> bool:
        """Some request is running, or could be admitted as far as the request is concerned."""
        if self.running:
            return True
        return any(r.is_ready and not self._comes_late(r) for r in self.waiting)

    def _comes_late(self, request: Request) -> bool:
        return self._closed_at is not None and request.arrival >= self._closed_at

    def computed(self, chunk: Chunk) -> None:
        """The chunk was run: its tokens are computed, and blocks that it filled can be shared."""
        request = chunk.request
        request.num_computed = chunk.end
        num_full = chunk.end // self._block_size
        if num_full == request.num_registered or not request.registers_blocks:
            return
        request.extend_hashes()
        for index in range(request.num_registered, num_full):
            block_hash = request.hashes[index]
            block = int(request.block_table[index])
            request.block_table[index] = self._pool.register(block, block_hash)
            self._stop_computing(block_hash, request)
        before, request.num_registered = request.num_registered, num_full
        if self._pool.journal:
            self._pool.journal.computed(request, before)

    def finish(self, request: Request) -> None:
        """Whatever it was doing, it is done."""
        self._forget_saved(request)
        if self._pool.journal:
            self._pool.journal.ended(request)
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._give_back_blocks(request)
        request.change(Change.FINISH)

    def clear_prefix_cache(self) -> int:
        """Forget every prefix, offloaded ones too; what is running goes on, and indexes no more
        blocks."""
        for request in self.running:
            request.registers_blocks = False
        for request in self.waiting:
            self._forget_saved(request)
        self._computing.clear()
        return self._pool.clear_index()

    def begin_epoch(self, epoch: int) -> None:
        """The weights are others: no block that was computed until now is found again."""
        self.clear_prefix_cache()
        for request in (*self.running, *self.waiting):
            request.begin_epoch(epoch)

    def preempt_all(self) -> None:
        """Give back all blocks; what is running will be computed again, in its old order."""
        for request in list(self.running):
            self._preempt(request, keeps_kv=False)

    def _preempt(self, request: Request, *, keeps_kv: bool = True) -> None:
        self.num_preemptions += 1
        if keeps_kv and self.offload is not None:
            num_used = -(-request.num_computed // self._block_size)
            blocks = request.blocks[:num_used].tolist()
            request.saved_kv = self.offload.save(
                blocks, request.num_computed, shareable=request.registers_blocks
            )
        self.running.remove(request)
        self._give_back_blocks(request)
        request.change(Change.PREEMPT)
        request.extend_hashes()
        insort(self.waiting, request, key=_URGENCY)

    def check(self) -> None:
        """Raise AssertionError unless requests, block tables and pool agree."""
        self._pool.check([r.blocks.tolist() for r in self.running])
        assert len(self.running) <= self._limits.max_batch_requests
        assert all(r.phase is Phase.WAITING and r.num_blocks == 0 for r in self.waiting)
        assert all(r.phase in (Phase.PREFILL, Phase.DECODE) for r in self.running)
        for requests in (self.waiting, self.running):
            assert requests == sorted(requests, key=_URGENCY)
        for request in self.running:
            assert request.num_computed < request.num_tokens
            assert request.num_computed <= request.num_blocks * self._block_size
        assert all(owner in self.running for owner in self._computing.values())
        assert all(r.saved_kv is None for r in self.running)
        if self.offload is not None:
            saved = [r.saved_kv.num_blocks for r in self.waiting if r.saved_kv is not None]
            assert sum(saved) == self.offload.num_blocks


def share_budget(owed: Sequence[int], budget: int) -> list[int]:
    """How many of the tokens that each prefill owes run in this step. `owed` is in the order of
    urgency, and not empty.

    The first comes first. But while others owe less than half of what it does, it leaves them half
    of the budget, the shortest first: a short prompt does not wait for the end of a long one, and
    prompts of about one length run one after the other, which brings each its first token soonest
    on average.
    """
    shares = [0] * len(owed)
    left = budget

    def give(index: int, most: int) -> None:
        nonlocal left
        share = min(owed[index] - shares[index], most, left)
        shares[index] += share
        left -= share

    short = [index for index, tokens in enumerate(owed) if 2 * tokens <= owed[0]]
    give(0, -(-budget // 2) if short else budget)
    for index in sorted(short, key=owed.__getitem__):
        give(index, left)
    for index in range(len(owed)):
        give(index, left)
    return shares


def whole_prompts(owed: Sequence[int], budget: int) -> list[int]:
    """As `share_budget`, where a prefill runs in one step: all that it owes, or nothing."""
    shares: list[int] = []
    for tokens in owed:
        shares.append(tokens if tokens <= budget else 0)
        budget -= shares[-1]
    return shares
