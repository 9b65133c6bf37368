"""Attention over the paged KV cache: `reference` in torch, for any device, and `flashinfer` for
CUDA. The CPU kernels are in `homing.engine.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from homing.engine.batch import Batch

__all__ = ["Attention"]


class Attention(Protocol):
    def plan(self, batch: Batch, block_size: int) -> None:
        """Get ready for a step, given its batch on the CPU. The step's calls of `attend` follow."""
        ...

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, window: int | None
    ) -> Tensor:
        """Causal attention of each row [tokens, heads, head_dim] over its own request's context, in
        one layer of the cache; the same batch, on the device."""
        ...
