"""A Hugging Face checkpoint's tensors, read by name, in the layout that both backends use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


class Checkpoint:
    """The tensors of a directory with `model.safetensors`, or with shards and their index."""

    def __init__(self, directory: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._directory = directory
        self._config = config
        self._dtype = dtype
        self._open_files = ExitStack()
        self._file_of_tensor: dict[str, Any] = {}  # tensor name -> open safetensors file
        for path in _weight_files(directory):
            try:
                file = self._open_files.enter_context(safe_open(str(path), "pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} is not a safetensors file: {error}") from None
            self._file_of_tensor.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_files.close()

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
            yield self._layer(f"model.layers.{index}.")

    @property
    def _vocab_shape(self) -> tuple[int, int]:
        return self._config.vocab_size, self._config.hidden_size

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        kv_heads = config.num_kv_heads
        attention = {"q_proj": config.num_heads, "k_proj": kv_heads, "v_proj": kv_heads}

        def tensor(name: str, *shape: int) -> Tensor:
            return self._tensor(prefix + name, *shape)

        def qkv(kind: str, *inputs: int) -> Tensor:
            return torch.cat(
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
            gate_up=torch.cat(
                [tensor(f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
            ),
            down=tensor("mlp.down_proj.weight", hidden, inner),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self._file_of_tensor:
            raise ConfigError(f"{self._directory}: the checkpoint has no tensor {name!r}")
        tensor = self._file_of_tensor[name].get_tensor(name)
        if tensor.shape != shape:
            found, expected = list(tensor.shape), list(shape)
            raise ConfigError(
                f"{self._directory}: {name} is {found}, but config.json makes it {expected}"
            )
        return tensor.to(self._dtype)


def _weight_files(directory: Path) -> list[Path]:
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
