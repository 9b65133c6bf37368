"""What a Hugging Face `config.json` says about a decoder of the Llama family.

Read here rather than by transformers: importing that costs seconds at every engine start. Names
and defaults are transformers' own. Whatever would change the arithmetic and is not built here is
refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from homing.engine.models import CPU, ModelShape
from homing.errors import ConfigError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

REQUIRED_SIZES = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"),
    "vocab_size",
)


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU MLP."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    rms_norm_eps: float
    rope: Mapping[str, Any]  # transformers' `rope_parameters`: rope_type, rope_theta, ...
    windows: tuple[int | None, ...]  # per layer: how many tokens it attends to, itself included
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool

    def shape(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> ModelShape:
        return ModelShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=self.eos_token_ids,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
        )


def read_config(directory: Path) -> DecoderConfig:
    """Raises ConfigError, in one line, for whatever we cannot run."""
    raw = _read_json(directory / "config.json")
    architecture = _architecture(directory, raw)
    _refuse_what_is_not_built(directory, raw)
    _require_sizes(directory, raw)
    num_layers = raw["num_hidden_layers"]
    num_heads = raw["num_attention_heads"]
    return DecoderConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_context_tokens=raw.get("max_position_embeddings", 2048),
        eos_token_ids=_eos_token_ids(directory, raw),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope_parameters(raw),
        windows=_windows(raw, architecture, num_layers),
        qkv_bias=architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_head=bool(raw.get("tie_word_embeddings", False)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no model directory: it has no {path.name}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def _architecture(directory: Path, raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["no architecture named in config.json"]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(
            f"{directory}: architecture {names[0]} is not supported (supported: {supported})"
        )
    return names[0]


def _refuse_what_is_not_built(directory: Path, raw: Mapping[str, Any]) -> None:
    refused = {
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(raw.get("mlp_bias")),
        "a quantised checkpoint": bool(raw.get("quantization_config")),
        "rope on a part of the head": raw.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for what, present in refused.items():
        if present:
            raise ConfigError(f"{directory}: {what} is not supported")


def _require_sizes(directory: Path, raw: Mapping[str, Any]) -> None:
    for name in REQUIRED_SIZES:
        if not isinstance(raw.get(name), int) or raw[name] < 1:
            raise ConfigError(f"{directory}: config.json has {raw.get(name)!r} for {name}")


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The new `rope_parameters`, or the older `rope_scaling` and `rope_theta`, as one mapping."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("max_position_embeddings", raw.get("max_position_embeddings", 2048))
    return rope


def _windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM":
        window = None
    if architecture.startswith("Qwen"):
        if not raw.get("use_sliding_window"):
            window = None
        default_types = [
            "sliding_attention" if i >= raw.get("max_window_layers", 28) else "full_attention"
            for i in range(num_layers)
        ]
        layer_types = raw.get("layer_types") or default_types
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return (window,) * num_layers


def _eos_token_ids(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins, as in transformers: chat models list their end of turn there."""
    eos = raw.get("eos_token_id")
    generation_config = directory / "generation_config.json"
    if generation_config.exists():
        eos = _read_json(generation_config).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
