"""Prepares the next decode step while a device computes this one.

A step of decodes alone is mostly followed by the same decodes, each one position further. But for
its tokens, which this step is about to choose, all of that next step is known already: it is laid
out, planned and sent to the device behind the step that runs, and needs its tokens alone when these
are there.

This can change no result, because nothing is decided here, and nothing taken. The next step is
scheduled as if there were no foresight. Then `Foreseen.is_of` compares all that a batch is made of,
apart from its tokens: the chunks, where their requests have their keys and values, and the model.
Only if nothing differs is the prepared step taken. Else it is forgotten, and the step is built as
ever: when a request ended, joined or was preempted, when a block was exchanged for one of the same
content, when another block was given out than expected, or when weights were updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from homing.engine.batch import Placement, lay_out
from homing.engine.block_pool import BlockPool
from homing.engine.kv_cache import KVCache
from homing.engine.models import Model
from homing.engine.models.graphed import GraphedDecoder
from homing.engine.plan import Chunk, StepPlan
from homing.engine.request import Phase


def next_decodes(plan: StepPlan) -> list[Chunk]:
    """What follows a step of decodes alone if none of them ends; none if that cannot be."""
    if not all(_may_go_on(chunk) for chunk in plan.chunks):
        return []
    return [
        Chunk(chunk.request, chunk.end, chunk.end + 1, scored=range(0), samples=True)
        for chunk in plan.chunks
    ]


def _may_go_on(chunk: Chunk) -> bool:
    """It is a decode, and the token that it chooses is not the last one allowed."""
    request = chunk.request
    return request.phase is Phase.DECODE and request.num_tokens + 1 < request.max_tokens


def placement_of_next(
    chunks: Sequence[Chunk], pool: BlockPool, block_size: int
) -> Placement | None:
    """Where these decodes will have their keys and values, the blocks that some of them begin
    included; None if they cannot have those without an eviction."""
    begins = [row for row, c in enumerate(chunks) if c.start == c.request.num_blocks * block_size]
    columns = [chunks[row].request.num_blocks for row in begins]
    blocks = pool.peek([int(chunks[row].request.blocks[-1]) for row in begins])
    if blocks is None:
        return None
    return Placement.of(chunks).with_blocks(begins, columns, blocks)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A step that is ready but for its tokens."""

    chunks: Sequence[Chunk]
    placement: Placement
    model: Model
    compute: Callable[[Tensor], Tensor]
    """From the token ids to the logits. To be called once, as the device's next step, or never."""

    @classmethod
    def of(
        cls, chunks: Sequence[Chunk], placement: Placement, model: Model, cache: KVCache
    ) -> Foreseen:
        """Lay these decodes out for where they will be, and tell the device what is known."""
        rows = lay_out(chunks, placement, cache.block_size)

        def compute(token_ids: Tensor) -> Tensor:
            return model.forward(replace(rows, token_ids=token_ids), cache)

        replay = model.prepare(rows, cache) if isinstance(model, GraphedDecoder) else None
        return cls(chunks, placement, model, replay or compute)

    def is_of(self, chunks: Sequence[Chunk], model: Model) -> bool:
        """These chunks, as their requests are now, make the batch that was prepared."""
        return (
            model is self.model
            and chunks == self.chunks
            and self.placement.equals(Placement.of(chunks))
        )
