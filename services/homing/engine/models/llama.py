"""The decoder of the Llama family in plain torch: the reference that the C kernels are tested
against, and what runs on CUDA.

On a CPU it computes in fp32 whatever the weights' dtype (bf16 there means bf16 values of weights
and cache, fp32 arithmetic), because torch's bf16 linears are slow on CPUs without bf16
instructions, and because that is what the C kernels do. Quantized weights are rounded, and then
kept in fp32: they take no less memory here. Runs where there is no compiler, at a fraction of their
speed.

On CUDA matrix products are of the weights' dtype, the head's too, whose logits are fp32 thereafter;
norms and rotations are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from homing.engine.attention import Attention
from homing.engine.attention.reference import TorchAttention
from homing.engine.batch import Batch
from homing.engine.kv_cache import KVCache, write_slots
from homing.engine.models import ModelShape
from homing.engine.models.checkpoint import (
    DecoderWeights,
    LayerWeights,
    layer_parameters,
    parameter_shapes,
)
from homing.engine.models.config import DecoderConfig
from homing.engine.models.quantization import NumberFormat, Quantization, fake_quantize
from homing.engine.models.rope import rope_tables

# On a CPU fp32 matrix products of 1, 2, 3 or 5 rows take other code paths in MKL than larger ones,
# and round otherwise. Padded to whole eights, a row's bits do not depend on how many rows there
# are.
ROW_MULTIPLE = 8


class TorchDecoder:
    """See `homing.engine.models.Model`."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: DecoderWeights,
        shape: ModelShape,
        on_layer: Callable[[int], None],
        quantization: Quantization | None = None,
        attention: Attention | None = None,
    ) -> None:
        """attention: None for the reference."""
        self.shape = shape
        self.attention = attention or TorchAttention()
        self.parameter_shapes: Mapping[str, tuple[int, ...]] = parameter_shapes(config)
        self._config = config
        self._quantization = quantization
        layers, head = quantization and quantization.layers, quantization and quantization.head
        self._embedding = self._own(checkpoint.embedding())
        self._layers = [self._own_layer(layer, layers) for layer in checkpoint.layers(on_layer)]
        self._final_norm = self._own(checkpoint.final_norm())
        if config.tied_head and head is None:
            self._head = self._embedding
        else:
            self._head = self._own(checkpoint.head(), head)
        tables = rope_tables(
            config.rope, head_dim=config.head_dim, num_positions=config.max_context_tokens
        )
        self._cosines, self._sines = (table.to(shape.device) for table in tables)

    @property
    def memory(self) -> Sequence[Tensor]:
        layers = [tensor for layer in self._layers for tensor in vars(layer).values()]
        tensors = (self._embedding, self._final_norm, self._head, *layers)
        return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())

    def updated(self, parameters: Mapping[str, Tensor]) -> TorchDecoder:
        old: dict[str, Tensor] = {
            "model.embed_tokens.weight": self._embedding,
            "model.norm.weight": self._final_norm,
            "lm_head.weight": self._head,
        }
        for index, layer in enumerate(self._layers):
            old |= layer_parameters(self._config, index, layer)
        new = {
            name: tensor.to(self.shape.device, self.shape.dtype)
            for name, tensor in parameters.items()
        }
        # In fp32 on a CPU: what was rounded to a scale is not of the model's dtype.
        dtype = self.shape.compute_dtype
        weights = DecoderWeights(self._config, dtype, old | new, origin="the update")
        return TorchDecoder(
            self._config,
            weights,
            self.shape,
            lambda index: None,
            self._quantization,
            self.attention,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self.attention.plan(batch, cache.block_size)
        return self.compute(batch.to(self.shape.device), cache, self.attention)

    def compute(self, batch: Batch, cache: KVCache, attention: Attention) -> Tensor:
        """The device's part of `forward`, which a CUDA graph can capture: `attention` has planned,
        and the batch is on the device."""
        hidden = self._embedding[batch.token_ids]  # [tokens, hidden]
        cosines = self._cosines[batch.positions][:, None]  # [tokens, 1, head_dim / 2]
        sines = self._sines[batch.positions][:, None]
        for index, layer in enumerate(self._layers):
            queries = self._queries(index, layer, hidden, cosines, sines, batch, cache)
            attended = attention.attend(
                queries,
                cache.keys[index],
                cache.values[index],
                batch,
                window=self._config.windows[index],
            )
            hidden = hidden + _linear(attended.flatten(1), layer.output)
            hidden = hidden + self._mlp(layer, hidden)
        hidden = self._norm(hidden[batch.selected], self._final_norm)
        return _linear(hidden, self._head).float()

    def _queries(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        cosines: Tensor,
        sines: Tensor,
        batch: Batch,
        cache: KVCache,
    ) -> Tensor:
        """[tokens, heads, head_dim]; writes the layer's keys and values."""
        config = self._config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = _linear(self._norm(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        queries, keys, values = qkv.unflatten(-1, (-1, config.head_dim)).split(heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(queries, layer.query_norm)
            keys = self._norm(keys, layer.key_norm)
        write_slots(cache.keys[index], _rotate(keys, cosines, sines), batch.slot_mapping)
        write_slots(cache.values[index], values, batch.slot_mapping)
        return _rotate(queries, cosines, sines)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = _linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return _linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight

    def _own_layer(self, layer: LayerWeights, number_format: NumberFormat | None) -> LayerWeights:
        """Matrices rounded to `number_format`, and back."""
        present = {name: tensor for name, tensor in vars(layer).items() if tensor is not None}
        return replace(
            layer,
            **{
                name: self._own(tensor, number_format if tensor.dim() == 2 else None)
                for name, tensor in present.items()
            },
        )

    def _own(self, tensor: Tensor, number_format: NumberFormat | None = None) -> Tensor:
        """A copy: what is read may be a mapped file, or a tensor that its owner changes."""
        if number_format is not None:
            tensor = fake_quantize(tensor.float(), number_format)
        return tensor.to(self.shape.device, self.shape.compute_dtype, copy=True)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    padding = -x.shape[0] % ROW_MULTIPLE
    return F.linear(F.pad(x, (0, 0, 0, padding)), weight, bias)[: x.shape[0]]


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of [tokens, heads, head_dim] by their angles."""
    first, second = x.chunk(2, dim=-1)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat(rotated, dim=-1).to(x.dtype)
