"""The packed layouts of weights, against the formula in `csrc/linear.h`."""

from __future__ import annotations

import pytest
import torch

from homing.engine.kernels.packing import (
    PANEL,
    interleave_gate_up,
    pack,
    part_gate_up,
)
from homing.engine.models.quantization import FP8, INT4, INT8, NumberFormat, quantize


def test_an_fp32_panel_holds_16_outputs_column_by_column() -> None:
    weight = torch.arange(32 * 6, dtype=torch.float32).view(32, 6)
    packed = pack(weight).panels
    assert packed.shape == (2, 6, PANEL)
    assert all(
        packed[n // PANEL, k, n % PANEL] == weight[n, k] for n in range(32) for k in range(6)
    )


def test_a_bf16_panel_holds_neighbouring_inputs_as_one_word() -> None:
    weight = torch.randn(32, 6).bfloat16()
    packed = pack(weight).panels
    assert packed.shape == (2, 3, PANEL, 2)
    assert all(
        packed[n // PANEL, k // 2, n % PANEL, k % 2] == weight[n, k]
        for n in range(32)
        for k in range(6)
    )


def test_missing_outputs_of_the_last_panel_are_zero() -> None:
    packed = pack(torch.ones(20, 4)).panels
    assert packed.shape == (2, 4, PANEL)
    assert packed[1, :, 4:].eq(0).all()


def test_gate_and_up_alternate_in_groups_of_8() -> None:
    gate, up = torch.zeros(24, 4), torch.ones(24, 4)
    kinds = interleave_gate_up(torch.cat([gate, up]))[:, 0].view(-1, 8)
    assert kinds.tolist() == [[0.0] * 8, [1.0] * 8] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpacking_gives_back_what_was_packed(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 32).to(dtype)
    assert torch.equal(pack(weight).unpacked(), weight)
    gate_up = torch.randn(64, 8).to(dtype)
    assert torch.equal(part_gate_up(interleave_gate_up(gate_up)), gate_up)


def test_an_int8_panel_holds_neighbouring_inputs_side_by_side() -> None:
    weight = torch.randn(32, 130)
    packed, numbers = pack(weight, INT8), quantize(weight, INT8).numbers
    assert packed.panels.shape == (2, 65, PANEL, 2)
    assert all(
        packed.panels[n // PANEL, k // 2, n % PANEL, k % 2] == numbers[n, k]
        for n in range(32)
        for k in range(130)
    )


def test_an_int4_byte_holds_one_output_of_each_half_of_the_panel() -> None:
    weight = torch.randn(16, 6)
    packed, numbers = pack(weight, INT4), quantize(weight, INT4).numbers
    assert packed.panels.shape == (1, 3, PANEL)
    for pair in range(3):
        for index in range(PANEL):
            byte = int(packed.panels[0, pair, index])
            output, k = index // 2, 2 * pair + index % 2
            assert byte >> 4 == numbers[output + PANEL // 2, k]
            assert (byte & 15) - 16 * (byte & 15 > 7) == numbers[output, k]


@pytest.mark.parametrize("number_format", [INT8, INT4, FP8], ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(40, 96), (16, 200)])
def test_unpacking_gives_back_what_was_rounded(
    number_format: NumberFormat, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape)
    packed = pack(weight, number_format)
    assert torch.equal(packed.unpacked(), quantize(weight, number_format).dequantized)
