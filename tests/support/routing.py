"""What routing policies choose by: the loads of ranks, and what each holds of a prompt."""

from __future__ import annotations

from homing.coordinator.loads import RankLoads, Slot
from homing.coordinator.routing import Match


def loads_of(*loads: int) -> RankLoads:
    """Slots 0, 1, ... with these loads. The last slot was chosen last."""
    ranks = RankLoads(max_load=10_000)
    for slot, load in enumerate(loads):
        ranks.open(Slot(slot))
        for _ in range(load):
            ranks.charge(Slot(slot))
    return ranks


def matches_of(*num_blocks: int) -> list[Match]:
    """Slot i holds `num_blocks[i]` of the prompt."""
    slots: dict[int, int] = {}
    for slot, held in enumerate(num_blocks):
        slots[held] = slots.get(held, 0) | 1 << slot
    return [Match(held, mask) for held, mask in sorted(slots.items(), reverse=True)]
