"""A decoder's weights as the C kernels read them, and back: packing loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from homing.engine.kernels.packing import interleave_gate_up, pack, part_gate_up, unpack
from homing.engine.models.checkpoint import DecoderWeights, LayerWeights, layer_parameters
from homing.engine.models.config import DecoderConfig

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class PackedLayer:
    """Matrices are packed in panels; norms and biases are fp32."""

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: LayerWeights) -> PackedLayer:
        return cls(
            attention_norm=_fp32(weights.attention_norm),
            query_norm=_fp32_or_none(weights.query_norm),
            key_norm=_fp32_or_none(weights.key_norm),
            mlp_norm=_fp32(weights.mlp_norm),
            qkv=pack(weights.qkv),
            qkv_bias=_fp32_or_none(weights.qkv_bias),
            output=pack(weights.output),
            gate_up=pack(interleave_gate_up(weights.gate_up)),
            down=pack(weights.down),
        )

    def unpacked(self, config: DecoderConfig, dtype: torch.dtype) -> LayerWeights:
        heads = config.num_heads + 2 * config.num_kv_heads
        return LayerWeights(
            attention_norm=self.attention_norm,
            qkv=unpack(self.qkv, heads * config.head_dim, dtype),
            qkv_bias=self.qkv_bias,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            output=unpack(self.output, config.hidden_size, dtype),
            mlp_norm=self.mlp_norm,
            gate_up=part_gate_up(unpack(self.gate_up, 2 * config.intermediate_size, dtype)),
            down=unpack(self.down, config.hidden_size, dtype),
        )


@dataclass(frozen=True)
class PackedWeights:
    embedding: Tensor  # [vocab, hidden] of the model's dtype
    final_norm: Tensor
    head: Tensor
    layers: tuple[PackedLayer, ...]

    @classmethod
    def of(cls, weights: DecoderWeights, on_layer: Callable[[int], None]) -> PackedWeights:
        return cls(
            embedding=_own(weights.embedding()),
            final_norm=_fp32(weights.final_norm()),
            head=pack(weights.head()),
            layers=tuple(map(PackedLayer.of, weights.layers(on_layer))),
        )

    def updated(
        self, config: DecoderConfig, weights: DecoderWeights, changed: Collection[str]
    ) -> PackedWeights:
        """With what `changed` names packed anew from `weights`, and the rest shared with this."""
        head = EMBEDDING if config.tied_head else HEAD
        return PackedWeights(
            embedding=_own(weights.embedding()) if EMBEDDING in changed else self.embedding,
            final_norm=_fp32(weights.final_norm()) if FINAL_NORM in changed else self.final_norm,
            head=pack(weights.head()) if head in changed else self.head,
            layers=tuple(
                PackedLayer.of(weights.layer(index))
                if any(name.startswith(f"model.layers.{index}.") for name in changed)
                else layer
                for index, layer in enumerate(self.layers)
            ),
        )

    def layer_parameters(
        self, config: DecoderConfig, index: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Hugging Face name -> tensor."""
        return layer_parameters(config, index, self.layers[index].unpacked(config, dtype))

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.final_norm, self.head)
        for layer in self.layers:
            yield from (tensor for tensor in vars(layer).values() if tensor is not None)


def _own(tensor: Tensor) -> Tensor:
    """A copy: what is read may be a mapped file, or a tensor that its owner changes in place."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _fp32(tensor: Tensor) -> Tensor:
    return _own(tensor).float()


def _fp32_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _fp32(tensor)
