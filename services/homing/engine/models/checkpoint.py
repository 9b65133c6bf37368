"""A decoder's tensors, read by their Hugging Face names, in the layout that both backends use.

`Checkpoint` reads those of a directory. Weights that come later, from a trainer, have the same
names: `parameter_shapes` lists them, and `layer_parameters` gives a backend's layer back as they
are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from homing.engine.models.config import DecoderConfig
from homing.errors import ConfigError


@dataclass(frozen=True)
class LayerWeights:
    """Matrices are [out, in]; `qkv` stacks query, key and value, `gate_up` gate and up."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class DecoderWeights:
    """Reads `tensors`, checks and converts them. What comes out may be a view of what went in: a
    file that may be written over, or a trainer's tensor. Backends copy what they keep."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor],
        *,
        origin: str,
    ) -> None:
        """origin: what errors call the place that the tensors are from."""
        self._config = config
        self._dtype = dtype
        self._tensors = tensors
        self._origin = origin

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        return self._tensor("model.embed_tokens.weight", *self._vocab_shape)

    def final_norm(self) -> Tensor:
        return self._tensor("model.norm.weight", self._config.hidden_size)

    def head(self) -> Tensor:
        """[vocab, hidden]; the embedding itself where the two are tied."""
        if self._config.tied_head:
            return self.embedding()
        return self._tensor("lm_head.weight", *self._vocab_shape)

    def layers(self, on_layer: Callable[[int], None]) -> Iterator[LayerWeights]:
        """One layer at a time, so that a backend that repacks never holds the model twice."""
        for index in range(self._config.num_layers):
            on_layer(index)
            yield self.layer(index)

    @property
    def _vocab_shape(self) -> tuple[int, int]:
        return self._config.vocab_size, self._config.hidden_size

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        kv_heads = config.num_kv_heads
        attention = {"q_proj": config.num_heads, "k_proj": kv_heads, "v_proj": kv_heads}

        def tensor(name: str, *shape: int) -> Tensor:
            return self._tensor(prefix + name, *shape)

        def qkv(kind: str, *inputs: int) -> Tensor:
            return self._stacked(
                [
                    tensor(f"self_attn.{name}.{kind}", heads * head_dim, *inputs)
                    for name, heads in attention.items()
                ]
            )

        return LayerWeights(
            attention_norm=tensor("input_layernorm.weight", hidden),
            qkv=qkv("weight", hidden),
            qkv_bias=qkv("bias") if config.qkv_bias else None,
            query_norm=tensor("self_attn.q_norm.weight", head_dim) if config.qk_norm else None,
            key_norm=tensor("self_attn.k_norm.weight", head_dim) if config.qk_norm else None,
            output=tensor("self_attn.o_proj.weight", hidden, config.num_heads * head_dim),
            mlp_norm=tensor("post_attention_layernorm.weight", hidden),
            gate_up=self._stacked(
                [tensor(f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
            ),
            down=tensor("mlp.down_proj.weight", hidden, inner),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        try:
            tensor = self._tensors[name]
        except KeyError:
            raise ConfigError(f"{self._origin}: the checkpoint has no tensor {name!r}") from None
        if tensor.shape != shape:
            found, expected = list(tensor.shape), list(shape)
            raise ConfigError(
                f"{self._origin}: {name} is {found}, but config.json makes it {expected}"
            )
        return tensor.to(self._dtype)

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)


class Checkpoint(DecoderWeights):
    """The tensors of a directory with `model.safetensors`, or with shards and their index."""

    def __init__(self, directory: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._files = TensorFiles(weight_files(directory))
        super().__init__(config, dtype, self._files, origin=str(directory))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of safetensors files, mapped."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises ConfigError for what is no safetensors file, or only the beginning of one."""
        self._open_files = ExitStack()
        self._file_of_tensor: dict[str, Any] = {}  # tensor name -> open safetensors file
        for path in paths:
            try:
                file = self._open_files.enter_context(safe_open(str(path), "pt"))
            except (OSError, SafetensorError) as error:
                self.close()
                raise ConfigError(f"{path} is not a safetensors file: {error}") from None
            self._file_of_tensor.update(dict.fromkeys(file.keys(), file))

    def close(self) -> None:
        self._open_files.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of_tensor[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of_tensor)

    def __len__(self) -> int:
        return len(self._file_of_tensor)


def weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        paths = [directory / shard for shard in sorted(shards)]
    else:
        paths = [directory / "model.safetensors"]
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{directory} has no weights: {path.name} is missing")
    return paths


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that such a decoder reads. A tied head is not one."""
    recorder = _Recorder(config)
    recorder.embedding()
    recorder.final_norm()
    recorder.head()
    for _ in recorder.layers(lambda index: None):
        pass
    return recorder.shapes


class _Recorder(DecoderWeights):
    """Notes what is asked for; answers with tensors without memory."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, torch.float32, {}, origin="")
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _tensor(self, name: str, *shape: int) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0]  # `cat` of tensors without memory would load torch's whole compiler


def layer_parameters(config: DecoderConfig, index: int, weights: LayerWeights) -> dict[str, Tensor]:
    """The tensors that `weights` was made of, by name, as views."""
    head_dim = config.head_dim
    rows = [count * head_dim for count in (config.num_heads, *(config.num_kv_heads,) * 2)]
    gate, up = weights.gate_up.chunk(2)
    tensors = {
        "input_layernorm.weight": weights.attention_norm,
        "post_attention_layernorm.weight": weights.mlp_norm,
        "self_attn.q_norm.weight": weights.query_norm,
        "self_attn.k_norm.weight": weights.key_norm,
        "self_attn.o_proj.weight": weights.output,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": weights.down,
    }
    for kind, stacked in (("weight", weights.qkv), ("bias", weights.qkv_bias)):
        if stacked is not None:
            for name, tensor in zip("qkv", stacked.split(rows), strict=True):
                tensors[f"self_attn.{name}_proj.{kind}"] = tensor
    prefix = f"model.layers.{index}."
    return {prefix + name: tensor for name, tensor in tensors.items() if tensor is not None}
