"""Rotary position tables: the frequencies of plain, linear, llama3 and YaRN scaling.

Formulas follow transformers' `modeling_rope_utils` in fp32, operation by operation, since logits
must agree with it to 1e-4. YaRN: Peng et al. 2023 (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from homing.errors import ConfigError


def rope_tables(
    rope: Mapping[str, Any], *, head_dim: int, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each fp32 [num_positions, head_dim / 2]."""
    frequencies, gain = _frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos() * gain, angles.sin() * gain


def _frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** exponents)
    match rope["rope_type"]:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / rope["factor"], 1.0
        case "llama3":
            return _llama3(frequencies, rope), 1.0
        case "yarn":
            return _yarn(frequencies, rope, head_dim), _yarn_gain(rope)
        case other:
            raise ConfigError(
                f"rope_type {other!r} is not supported (supported: default, linear, llama3, yarn)"
            )


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / rope["factor"]
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched + smooth * frequencies
    result = torch.where(wavelengths > context / low, stretched, frequencies)
    is_between = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(is_between, between, result)


def _yarn(frequencies: Tensor, rope: Mapping[str, Any], head_dim: int) -> Tensor:
    context = _original_context(rope)

    def dim_of_rotations(rotations: float) -> float:
        ratio = context / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope["rope_theta"]))

    low = dim_of_rotations(rope.get("beta_fast") or 32.0)
    high = dim_of_rotations(rope.get("beta_slow") or 1.0)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / _yarn_factor(rope) * ramp + frequencies * (1 - ramp)


def _yarn_gain(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    factor = _yarn_factor(rope)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)


def _original_context(rope: Mapping[str, Any]) -> int:
    return rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]


def _yarn_factor(rope: Mapping[str, Any]) -> float:
    return rope.get("factor") or rope["max_position_embeddings"] / _original_context(rope)
