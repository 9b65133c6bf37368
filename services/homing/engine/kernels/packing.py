"""The layout of weights that the micro-kernel in `csrc/linear.h` reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 16  # as in linear.h


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> panels of 16 outputs, missing ones zero.

    fp32: [panels, in, 16]. bf16: [panels, in / 2, 16, 2], so that one 32-bit word holds a pair.
    """
    if missing := -weight.shape[0] % PANEL:
        weight = F.pad(weight, (0, 0, 0, missing))  # a copy, even of nothing missing
    weight = weight.contiguous()
    if weight.dtype == torch.bfloat16:
        weight = weight.view(torch.int32)  # a pair moves as one
    panels = weight.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return panels


def unpack(panels: Tensor, num_outputs: int, dtype: torch.dtype) -> Tensor:
    """What was packed, of `dtype`: [out, in]."""
    rows = panels.transpose(1, 2).flatten(0, 1).contiguous()
    return rows.view(dtype)[:num_outputs]


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
