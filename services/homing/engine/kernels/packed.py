"""A decoder's weights as the C kernels read them, and back. Packing itself loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from homing.engine.kernels.packing import (
    PackedMatrix,
    interleave_gate_up,
    pack,
    part_gate_up,
)
from homing.engine.models.checkpoint import DecoderWeights, LayerWeights, layer_parameters
from homing.engine.models.config import DecoderConfig
from homing.engine.models.quantization import NumberFormat, Quantization

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class PackedLayer:
    """Norms and biases are fp32."""

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    qkv: PackedMatrix
    qkv_bias: Tensor | None
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix

    @classmethod
    def of(cls, weights: LayerWeights, number_format: NumberFormat | None) -> PackedLayer:
        return cls(
            attention_norm=_fp32(weights.attention_norm),
            query_norm=_fp32_or_none(weights.query_norm),
            key_norm=_fp32_or_none(weights.key_norm),
            mlp_norm=_fp32(weights.mlp_norm),
            qkv=pack(weights.qkv, number_format),
            qkv_bias=_fp32_or_none(weights.qkv_bias),
            output=pack(weights.output, number_format),
            gate_up=pack(interleave_gate_up(weights.gate_up), number_format),
            down=pack(weights.down, number_format),
        )

    def unpacked(self) -> LayerWeights:
        return LayerWeights(
            attention_norm=self.attention_norm,
            qkv=self.qkv.unpacked(),
            qkv_bias=self.qkv_bias,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            output=self.output.unpacked(),
            mlp_norm=self.mlp_norm,
            gate_up=part_gate_up(self.gate_up.unpacked()),
            down=self.down.unpacked(),
        )


@dataclass(frozen=True)
class PackedWeights:
    embedding: Tensor  # [vocab, hidden] of the model's dtype
    final_norm: Tensor
    head: PackedMatrix
    layers: tuple[PackedLayer, ...]
    quantization: Quantization | None

    @classmethod
    def of(
        cls,
        weights: DecoderWeights,
        on_layer: Callable[[int], None],
        quantization: Quantization | None = None,
    ) -> PackedWeights:
        layer_format = quantization and quantization.layers
        return cls(
            embedding=_own(weights.embedding()),
            final_norm=_fp32(weights.final_norm()),
            head=pack(weights.head(), quantization and quantization.head),
            layers=tuple(PackedLayer.of(layer, layer_format) for layer in weights.layers(on_layer)),
            quantization=quantization,
        )

    def updated(
        self, config: DecoderConfig, weights: DecoderWeights, changed: Collection[str]
    ) -> PackedWeights:
        """With what `changed` names packed anew from `weights`, and the rest shared with this."""
        head = EMBEDDING if config.tied_head else HEAD
        formats = self.quantization
        embedding = self.embedding
        if EMBEDDING in changed:
            embedding = _own(weights.embedding().to(embedding.dtype))
        return PackedWeights(
            embedding=embedding,
            final_norm=_fp32(weights.final_norm()) if FINAL_NORM in changed else self.final_norm,
            head=pack(weights.head(), formats and formats.head) if head in changed else self.head,
            layers=tuple(
                PackedLayer.of(weights.layer(index), formats and formats.layers)
                if any(name.startswith(f"model.layers.{index}.") for name in changed)
                else layer
                for index, layer in enumerate(self.layers)
            ),
            quantization=formats,
        )

    def layer_parameters(self, config: DecoderConfig, index: int) -> dict[str, Tensor]:
        """Hugging Face name -> tensor; a matrix that was rounded is in fp32."""
        return layer_parameters(config, index, self.layers[index].unpacked())

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.final_norm, *self.head.tensors)
        for layer in self.layers:
            for part in vars(layer).values():
                if part is not None:
                    yield from part.tensors if isinstance(part, PackedMatrix) else (part,)


def _own(tensor: Tensor) -> Tensor:
    """A copy: what is read may be a mapped file, or a tensor that its owner changes in place."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _fp32(tensor: Tensor) -> Tensor:
    return _own(tensor).float()


def _fp32_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _fp32(tensor)
