"""Weights in 8 or 4 bits: what they are rounded to, and back. Knows nothing of packed layouts.

    int8   whole numbers of -127 to 127, a scale for each 64 neighbouring inputs of an output
    int4   whole numbers of -8 to 7, a scale for each 32; the head, which every token's probability
           goes through, is in int8
    fp8    e4m3, a scale for each output

Norms, biases and the embedding keep the model's dtype. Scales have the 8 bits of a bf16's mantissa,
which makes rounding what was rounded before change nothing: a group's largest weight is a multiple
of its scale that says the scale again. Updates of a part of what is fused rely on that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from homing.errors import ConfigError


@dataclass(frozen=True)
class NumberFormat:
    """One way to keep a matrix [out, in]."""

    name: str
    group: int | None
    """Neighbouring inputs that share a scale; None: all of an output's."""
    largest: float
    """The largest weight of a group becomes this. Negative: whatever its sign, it becomes that."""
    least: float
    most: float

    @property
    def is_integer(self) -> bool:
        return self.name != "fp8"

    @property
    def bytes_per_weight(self) -> float:
        """Its share of a scale included, but for scales of whole outputs: they are too few."""
        number_bytes = 0.5 if self.name == "int4" else 1.0
        return number_bytes + (torch.bfloat16.itemsize / self.group if self.group else 0)


INT8 = NumberFormat("int8", 64, 127.0, -127.0, 127.0)
INT4 = NumberFormat("int4", 32, -8.0, -8.0, 7.0)
FP8 = NumberFormat("fp8", None, 448.0, -448.0, 448.0)


@dataclass(frozen=True)
class Quantization:
    """The formats of a model's matrices."""

    layers: NumberFormat
    head: NumberFormat


QUANTIZATIONS = {
    "int8": Quantization(INT8, INT8),
    "int4": Quantization(INT4, INT8),
    "fp8": Quantization(FP8, FP8),
}


def quantization_of(name: str | None) -> Quantization | None:
    """Raises ConfigError, in one line, for a name that there is not."""
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        names = ", ".join(QUANTIZATIONS)
        raise ConfigError(f"quantization {name!r} is not supported (supported: {names})")
    return QUANTIZATIONS[name]


@dataclass(frozen=True)
class QuantizedMatrix:
    """weight[n, k] = numbers[n, k] * scales[n, k // group]."""

    format: NumberFormat
    numbers: Tensor  # [out, in], fp32, of values that the format has
    scales: Tensor  # [out, groups], fp32, of values that bf16 has

    @property
    def dequantized(self) -> Tensor:
        """[out, in], fp32; exact."""
        num_inputs = self.numbers.shape[1]
        group = self.format.group or num_inputs
        return self.numbers * self.scales.repeat_interleave(group, dim=1)[:, :num_inputs]


def quantize(weight: Tensor, number_format: NumberFormat) -> QuantizedMatrix:
    """Round a matrix [out, in] to nearest. Each output depends on its own weights alone."""
    num_outputs, num_inputs = weight.shape
    group = number_format.group or num_inputs
    weight = F.pad(weight.float(), (0, -num_inputs % group)).view(num_outputs, -1, group)
    scales = (_largest(weight, number_format) / number_format.largest).bfloat16().float()
    numbers = torch.where(scales != 0, weight / scales, 0.0)
    numbers = numbers.clamp_(number_format.least, number_format.most)
    numbers = _rounded(numbers, number_format).flatten(1)[:, :num_inputs]
    return QuantizedMatrix(number_format, numbers, scales.squeeze(-1))


def fake_quantize(weight: Tensor, number_format: NumberFormat | None) -> Tensor:
    """What a matrix is after rounding, in fp32; None: as it is."""
    if number_format is None:
        return weight.float()
    return quantize(weight, number_format).dequantized


def _largest(groups: Tensor, number_format: NumberFormat) -> Tensor:
    """Of each group [out, groups, group] -> [out, groups, 1]: by magnitude, the sign kept where one
    side of the format reaches further than the other."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if number_format.largest > 0:
        return torch.maximum(-low, high)
    return torch.where(-low >= high, low, high)


def _rounded(numbers: Tensor, number_format: NumberFormat) -> Tensor:
    if number_format.is_integer:
        return numbers.round_()
    return numbers.to(torch.float8_e4m3fn).float()
