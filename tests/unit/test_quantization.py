"""Rounding weights: how near it stays, and that rounding again changes nothing."""

from __future__ import annotations

import pytest
import torch

from homing.engine.models.quantization import FP8, INT4, INT8, NumberFormat, quantize

FORMATS = pytest.mark.parametrize("number_format", [INT8, INT4, FP8], ids=lambda f: f.name)


@FORMATS
def test_rounding_what_was_rounded_changes_nothing(number_format: NumberFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator) * torch.rand(300, 1, generator=generator)
    once = quantize(weight, number_format).dequantized
    assert torch.equal(quantize(once, number_format).dequantized, once)


@pytest.mark.parametrize(
    ("number_format", "error"), [(INT8, 0.007), (INT4, 0.11), (FP8, 0.03)], ids=["8", "4", "f8"]
)
def test_the_error_is_that_of_the_formats_steps(number_format: NumberFormat, error: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    rounded = quantize(weight, number_format).dequantized
    assert (rounded - weight).norm() / weight.norm() < error


@FORMATS
def test_zeros_stay_zeros(number_format: NumberFormat) -> None:
    assert not quantize(torch.zeros(3, 64), number_format).dequantized.any()


@FORMATS
def test_an_output_does_not_depend_on_the_others(number_format: NumberFormat) -> None:
    """So parts of what is stacked can be updated alone."""
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(2))
    whole = quantize(weight, number_format).dequantized
    assert torch.equal(quantize(weight[7:9], number_format).dequantized, whole[7:9])


def test_int4_uses_all_of_its_range_on_the_side_of_the_largest_weight() -> None:
    weight = torch.tensor([[0.5, -1.0], [1.0, -0.5]])
    assert quantize(weight, INT4).numbers.tolist() == [[4.0, -8.0], [-8.0, 4.0]]
