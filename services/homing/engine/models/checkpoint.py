"""A Hugging Face checkpoint's tensors, read by name and gathered into the layout both backends use."""

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
    """Matrices are [out, in]; `qkv` stacks query, key and value rows, `gate_up` gate and up rows."""

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
        return self._tensor("model.embed_tokens.weight")

    def final_norm(self) -> Tensor:
        return self._tensor("model.norm.weight")

    def head(self) -> Tensor:
        """[vocab, hidden]; the embedding itself where the two are tied."""
        return self.embedding() if self._config.tied_head else self._tensor("lm_head.weight")

    def layers(self, on_layer: Callable[[int], None]) -> Iterator[LayerWeights]:
        """One layer at a time, so that a backend that repacks never holds the model twice."""
        for index in range(self._config.num_layers):
            on_layer(index)
            yield self._layer(f"model.layers.{index}.")

    def _layer(self, prefix: str) -> LayerWeights:
        def tensor(name: str) -> Tensor:
            return self._tensor(prefix + name)

        def stacked(*names: str) -> Tensor:
            return torch.cat([tensor(name) for name in names])

        qkv_names = [f"self_attn.{kind}_proj" for kind in "qkv"]
        return LayerWeights(
            attention_norm=tensor("input_layernorm.weight"),
            qkv=stacked(*(f"{name}.weight" for name in qkv_names)),
            qkv_bias=(
                stacked(*(f"{name}.bias" for name in qkv_names)) if self._config.qkv_bias else None
            ),
            query_norm=tensor("self_attn.q_norm.weight") if self._config.qk_norm else None,
            key_norm=tensor("self_attn.k_norm.weight") if self._config.qk_norm else None,
            output=tensor("self_attn.o_proj.weight"),
            mlp_norm=tensor("post_attention_layernorm.weight"),
            gate_up=stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=tensor("mlp.down_proj.weight"),
        )

    def _tensor(self, name: str) -> Tensor:
        if name not in self._file_of_tensor:
            raise ConfigError(f"{self._directory}: the checkpoint has no tensor {name!r}")
        return self._file_of_tensor[name].get_tensor(name).to(self._dtype)


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
