"""Which rank gets a request: pure functions of what the ranks hold and how busy they are.

A policy is given the ranks that may be chosen, parted by how much of the prompt each is believed
to hold, and their loads. `prefix_affinity` scores each rank

    matched blocks / prompt blocks - alpha * (load - mean) / max(1, mean)

with the mean over all live ranks. The first term is at most 1, a full hit. The second is a rank's
load measured against the fleet's: nothing when the fleet is even, uncapped when it is not. With
alpha 0 only the prefix counts; with alpha 1 a single request of imbalance across two ranks cancels
a full hit. The floor under the mean is what makes that true: without it a lone request on an idle
fleet would weigh as much as the fleet has ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from msgspec import Struct

from homing.coordinator.loads import TURN_BITS, RankLoads, Slot, slots_of
from homing.coordinator.step_model import StepTimes


class Match(Struct, frozen=True, gc=False):
    """Ranks that hold equally much of a prompt."""

    num_blocks: int
    """Blocks matched, counted from the prompt's first."""
    slots: int
    """The ranks, as a set of slots; not empty."""


def prefix_affinity(
    matches: Sequence[Match], num_prompt_blocks: int, loads: RankLoads, alpha: float
) -> Slot:
    """Highest score; ties to the least loaded, then to the least recently chosen.

    Ranks with equal matches differ by their load alone, so the least loaded of each group is the
    only candidate. `alpha * mean` is the same for all ranks and left out: subtracting it would
    only add rounding errors that break exact ties. No score is above what is held: the groups that
    hold less than the best score are not looked at.
    """
    if len(matches) == 1:
        return loads.least_loaded(matches[0].slots)
    weight = alpha / max(loads.floor, loads.mean)
    best, best_score, best_order = Slot(0), -inf, 0
    for match in matches:
        held = match.num_blocks / num_prompt_blocks
        if held < best_score:
            break
        slot = loads.least_loaded(match.slots)
        order = loads.order(slot)
        score = held - weight * (order >> TURN_BITS)
        if score > best_score or (score == best_score and order < best_order):
            best, best_score, best_order = slot, score, order
    return best


def longest_prefix(
    matches: Sequence[Match], num_prompt_blocks: int, loads: RankLoads, alpha: float
) -> Slot:
    """The deepest match, whatever its load: `prefix_affinity` with alpha 0.

    Ties to the least loaded, so it balances what no rank holds. Source: the coordinator of Megatron
    Core, whose policy of this name takes the ranks that hold the deepest known block.
    """
    return loads.least_loaded(matches[0].slots)


def first_prefix_block(
    matches: Sequence[Match], num_prompt_blocks: int, loads: RankLoads, alpha: float
) -> Slot:
    """`prefix_affinity` with the hit cut to yes or no: does the rank hold the first block?

    Keeps tenants with different system prompts apart and ignores what follows. Source: the
    coordinator of Megatron Core, which cuts the list of hashes to its first.
    """
    holders = _all_slots(match for match in matches if match.num_blocks)
    others = _all_slots(match for match in matches if not match.num_blocks)
    cut = [Match(held, slots) for held, slots in ((1, holders), (0, others)) if slots]
    return prefix_affinity(cut, 1, loads, alpha)


def load_balanced(
    matches: Sequence[Match], num_prompt_blocks: int, loads: RankLoads, alpha: float
) -> Slot:
    """The least loaded; ties to the least recently chosen."""
    return loads.least_loaded(_all_slots(matches))


def round_robin(
    matches: Sequence[Match], num_prompt_blocks: int, loads: RankLoads, alpha: float
) -> Slot:
    """The least recently chosen, whatever its load."""
    return loads.least_recent(_all_slots(matches))


class Price(NamedTuple):
    """What a rank asks for a request: see `work`. Kept up to date by `Backlog`."""

    clear_at: float
    """When the prompt tokens that the rank owes will have been computed."""
    per_second: float
    """For each second that the request would take by itself, on an average rank."""
    fixed_s: float


DECODING = 0.1
"""What a second of decoding weighs against one until the first token. Of 0, 0.1, 0.3 and 1 it did
best over the generated workloads of `homing bench route`; docs/routing.md has the figures."""


def price(
    clear_at: float,
    num_running: int,
    context_tokens: float,
    answer_tokens: float,
    step: StepTimes,
    factor: float,
) -> Price:
    """The price of a rank that has `num_running` requests with `context_tokens` in all.

    `factor` is how many times as long as the average rank it takes.
    """
    found_s = step.base + step.row * num_running + step.kv * context_tokens
    return Price(
        clear_at,
        per_second=factor * (1 + num_running),
        fixed_s=factor * DECODING * answer_tokens * found_s,
    )


def work_costs(
    matches: Sequence[Match],
    num_prompt_tokens: int,
    block_size: int,
    answer_tokens: float,
    step: StepTimes,
    prices: Mapping[Slot, Price],
    now: float,
) -> tuple[list[Slot], list[float]]:
    """The ranks, and of each the expected time to finish the request, and to delay those that run:

        wait + (1 + running) * own + DECODING * answer * (base + row * running + kv * context)
        own = prefill of the uncached tokens + DECODING * answer * (row + kv * prompt)

    It waits until the rank has computed what it owes. What it then takes by itself is felt by it
    and by each request that runs there; the step that those take already is felt by it alone.

    Sources: wait and prefill are what Mooncake (FAST'25, algorithm 1) minimises; uncached tokens
    times requests is LMetric's rule (arXiv 2603.15202), here in seconds.
    """
    decoding_s = DECODING * answer_tokens * (step.row + step.kv * num_prompt_tokens)
    slots: list[Slot] = []
    seconds: list[float] = []
    for match in matches:
        num_cached = min(match.num_blocks * block_size, num_prompt_tokens - 1)
        own_s = step.prefill_s(num_cached, num_prompt_tokens) + decoding_s
        slots += slots_of(match.slots)
        seconds += [own_s] * (len(slots) - len(seconds))
    costs = [  # in one expression: it may be 256 ranks wide
        fixed_s + per_second * own_s + (clear_at - now if clear_at > now else 0.0)
        for own_s, (clear_at, per_second, fixed_s) in zip(
            seconds, map(prices.__getitem__, slots), strict=True
        )
    ]
    return slots, costs


def work(slots: Sequence[Slot], costs: Sequence[float], loads: RankLoads) -> Slot:
    """The least of `work_costs`; ties to the least loaded, then to the least recently chosen."""
    least = min(costs)
    if costs.count(least) == 1:
        return slots[costs.index(least)]
    tied = (1 << slot for slot, cost in zip(slots, costs, strict=True) if cost == least)
    return loads.least_loaded(sum(tied))


def _all_slots(matches: Iterable[Match]) -> int:
    slots = 0
    for match in matches:
        slots |= match.slots
    return slots


Policy = Callable[[Sequence[Match], int, RankLoads, float], Slot]
"""(matches, the prompt's full blocks, loads, alpha) -> the chosen slot. The matches part the ranks
that may be chosen, who holds most first; there is at least one."""

POLICIES: dict[str, Policy] = {
    "prefix_affinity": prefix_affinity,
    "longest_prefix": longest_prefix,
    "first_prefix_block": first_prefix_block,
    "load_balanced": load_balanced,
    "round_robin": round_robin,
}

WORK = "work"
POLICY_NAMES = (*POLICIES, WORK)
"""`work` looks at more than the others do, and is called apart from them."""

_READS_PREFIXES = {"prefix_affinity", "longest_prefix", "first_prefix_block", WORK}


def reads_prefixes(policy: str) -> bool:
    """Whether the policy looks at matches: if not, clients need not hash their prompts."""
    return policy in _READS_PREFIXES
