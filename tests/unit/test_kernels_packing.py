"""The packed layouts of weights, against the formula in `csrc/linear.h`."""

from __future__ import annotations

import pytest
import torch

from homing.engine.kernels.packing import (
    PANEL,
    interleave_gate_up,
    pack,
    part_gate_up,
    unpack,
)


def test_an_fp32_panel_holds_16_outputs_column_by_column() -> None:
    weight = torch.arange(32 * 6, dtype=torch.float32).view(32, 6)
    packed = pack(weight)
    assert packed.shape == (2, 6, PANEL)
    assert all(
        packed[n // PANEL, k, n % PANEL] == weight[n, k] for n in range(32) for k in range(6)
    )


def test_a_bf16_panel_holds_neighbouring_inputs_as_one_word() -> None:
    weight = torch.randn(32, 6).bfloat16()
    packed = pack(weight).view(torch.bfloat16).view(2, 3, PANEL, 2)
    assert all(
        packed[n // PANEL, k // 2, n % PANEL, k % 2] == weight[n, k]
        for n in range(32)
        for k in range(6)
    )


def test_missing_outputs_of_the_last_panel_are_zero() -> None:
    packed = pack(torch.ones(20, 4))
    assert packed.shape == (2, 4, PANEL)
    assert packed[1, :, 4:].eq(0).all()


def test_gate_and_up_alternate_in_groups_of_8() -> None:
    gate, up = torch.zeros(24, 4), torch.ones(24, 4)
    kinds = interleave_gate_up(torch.cat([gate, up]))[:, 0].view(-1, 8)
    assert kinds.tolist() == [[0.0] * 8, [1.0] * 8] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_gives_back_what_was_packed(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 32).to(dtype)
    assert torch.equal(unpack(pack(weight), 40, dtype), weight)
    gate_up = torch.randn(64, 8).to(dtype)
    assert torch.equal(part_gate_up(interleave_gate_up(gate_up)), gate_up)
