"""The models that an engine can run, behind one small interface.

`config` reads what a checkpoint is, `llama` is the decoder of the Llama family in plain torch
(the reference, for any machine), and `homing.engine.kernels` runs the same decoder in C. Which
one runs is chosen once, in `homing.engine.weights.load_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from homing.engine.batch import Batch

if TYPE_CHECKING:
    from homing.engine.kv_cache import KVCache

__all__ = ["CPU", "Model", "ModelShape"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelShape:
    """What the scheduler, the KV cache and the model card need to know of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of weights that are not rounded; activations and logits are fp32 on a CPU
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: `dtype`. int8 has scales
    device: torch.device = CPU  # of weights and KV cache

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the torch path's matrix products."""
        return torch.float32 if self.device.type == "cpu" else self.dtype


class Model(Protocol):
    """A decoder. On a CPU a row's logits have the same bits whatever else is in the batch or the
    cache."""

    @property
    def shape(self) -> ModelShape: ...

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Write the batch's keys and values to `cache`; fp32 logits [selected, vocab_size]."""
        ...

    @property
    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every parameter."""
        ...

    def updated(self, parameters: Mapping[str, Tensor]) -> Model:
        """A model with these parameters, of checked names and shapes, and this one's for the rest.

        May be called on another thread while this one computes, and leaves it as it is. The new
        model has no memory in common with `parameters`; it may with this one.
        """
        ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """All that its weights lie in."""
        ...
