"""The layout of weights that the micro-kernel in `csrc/linear.h` reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from homing.engine.models.quantization import NumberFormat, QuantizedMatrix, quantize

PANEL = 16  # as in linear.h


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [out, in] in panels of 16 outputs, missing ones zero.

    fp32, fp16, fp8: [panels, in, 16]. bf16, int8: [panels, in / 2, 16, 2], so that a pair of inputs
    is one word. int4: [panels, in / 2, 16] bytes; a byte holds one number of a pair of the first 8
    outputs in its low half, and the same of the other 8 in its high half.
    """

    panels: Tensor
    scales: Tensor | None  # bf16 [panels, groups, 16]
    num_outputs: int
    num_inputs: int
    format: NumberFormat | None  # None: a plain number of the panels' dtype

    @property
    def tensors(self) -> list[Tensor]:
        return [self.panels] if self.scales is None else [self.panels, self.scales]

    @property
    def group(self) -> int:
        """Neighbouring inputs that share a scale."""
        return (self.format and self.format.group) or self.num_inputs

    def unpacked(self) -> Tensor:
        """What was packed: [out, in], in fp32 if it was rounded on the way."""
        if self.format is None:
            return _unpack_plain(self.panels)[: self.num_outputs]
        assert self.scales is not None
        numbers = _NUMBERS_OF[self.format.name](self.panels)[: self.num_outputs].float()
        scales = _columns_first(self.scales.float())[: self.num_outputs]
        return QuantizedMatrix(self.format, numbers, scales).dequantized


def pack(weight: Tensor, number_format: NumberFormat | None = None) -> PackedMatrix:
    """[out, in] of any float dtype -> panels, rounded to `number_format` if there is one."""
    num_outputs, num_inputs = weight.shape
    if number_format is None:
        return PackedMatrix(_pack_plain(weight), None, num_outputs, num_inputs, None)
    matrix = quantize(weight, number_format)
    panels = _PANELS_OF[number_format.name](_whole_panels(matrix.numbers))
    scales = _pack_plain(matrix.scales).bfloat16()
    return PackedMatrix(panels, scales, num_outputs, num_inputs, number_format)


def _pack_plain(weight: Tensor) -> Tensor:
    weight = _whole_panels(weight)
    if weight.dtype != torch.bfloat16:
        return weight.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    words = weight.contiguous().view(torch.int32)  # a pair moves as one
    panels = words.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return panels.view(torch.bfloat16).unflatten(-1, (PANEL, 2))


def _unpack_plain(panels: Tensor) -> Tensor:
    if panels.dtype == torch.bfloat16:
        return panels.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    return _columns_first(panels)


def _columns_first(panels: Tensor) -> Tensor:
    """[panels, columns, 16] -> [outputs, columns]."""
    return panels.transpose(1, 2).flatten(0, 1)


def _whole_panels(weight: Tensor) -> Tensor:
    if missing := -weight.shape[0] % PANEL:
        return F.pad(weight, (0, 0, 0, missing))  # a copy, even of nothing missing
    return weight


def _pack_fp8(numbers: Tensor) -> Tensor:
    # Moved as bytes: torch cannot do much with its fp8 dtypes.
    return _pack_plain(numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def _pack_int8(numbers: Tensor) -> Tensor:
    pairs = numbers.to(torch.int8).unflatten(1, (-1, 2)).unflatten(0, (-1, PANEL))
    return pairs.transpose(1, 2).contiguous()


def _pack_int4(numbers: Tensor) -> Tensor:
    low, high = _pack_int8(numbers).chunk(2, dim=2)  # [panels, in / 2, 8, 2]
    return ((high << 4) | (low & 15)).flatten(2)


def _unpack_int8(panels: Tensor) -> Tensor:
    return panels.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)


def _unpack_int4(panels: Tensor) -> Tensor:
    halves = torch.cat([panels << 4 >> 4, panels >> 4], dim=-1)
    return _unpack_int8(halves.unflatten(-1, (PANEL, 2)))


_PANELS_OF = {"fp8": _pack_fp8, "int8": _pack_int8, "int4": _pack_int4}
_NUMBERS_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda panels: _columns_first(panels).view(torch.float8_e4m3fn),
    "int8": _unpack_int8,
    "int4": _unpack_int4,
}


def interleave_gate_up(gate_up: Tensor) -> Tensor:
    """Rows of gate, then of up -> 8 of gate, the same 8 of up, and so on: one panel a group."""
    gate, up = gate_up.chunk(2)
    half = PANEL // 2
    pairs = torch.stack([gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))], dim=1)
    return pairs.flatten(0, 2)


def part_gate_up(interleaved: Tensor) -> Tensor:
    """Undo `interleave_gate_up`."""
    groups = interleaved.unflatten(0, (-1, 2, PANEL // 2))
    return groups.transpose(0, 1).flatten(0, 2)
