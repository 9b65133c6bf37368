"""The C kernels in the shape that they have on a CPU with AVX-512 and its instructions for bf16.

That code runs here with those instructions emulated, and is compiled for CPUs that have them.
Whole models run on it beside the others: see `EMULATED` in `tests/support/backends.py`.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from homing.engine.kernels.build import FLAGS, SOURCE
from homing.engine.kernels.decoder import _linear
from homing.engine.kernels.packing import PackedMatrix, pack
from homing.engine.models.quantization import FP8, INT4, INT8, NumberFormat
from homing.native import COMPILERS, compile_source
from tests.support.backends import EMULATED, EXTRA_FLAGS, load_backend
from tests.support.tiny_models import make_tiny_model

PARTS = Path(__file__).parents[1] / "support" / "kernel_parts.c"
LANES = 16
WIDTHS = {"own": ("-O1",), "AVX-512": EXTRA_FLAGS[EMULATED]}

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")


class Parts:
    """`tests/support/kernel_parts.c`, compiled."""

    def __init__(self, directory: Path, flags: tuple[str, ...]) -> None:
        library = directory / "parts.so"
        compile_source(PARTS, library, (*FLAGS, *flags, f"-I{SOURCE.parent}"))
        self._library = ctypes.CDLL(str(library))
        self._library.scratch_bytes.restype = ctypes.c_size_t

    def dot_bf16(self, sums: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
        """[n, 16] sums, [n, 16, 2] weights, [n, 2] pairs."""
        result = sums.clone()
        self._library.dot_bf16_of(*map(_pointer, (result, weights, pairs)), len(sums))
        return result

    def round_bf16(self, numbers: Tensor) -> Tensor:
        result = torch.empty(numbers.shape, dtype=torch.bfloat16)
        self._library.round_bf16_of(_pointer(result), _pointer(numbers), numbers.numel())
        return result

    def multiply(self, rows: Tensor, weights: PackedMatrix) -> Tensor:
        result = torch.empty(len(rows), weights.num_outputs)
        scratch = torch.empty(self._library.scratch_bytes(rows.shape[1]), dtype=torch.uint8)
        linear = ctypes.byref(_linear(weights))
        self._library.multiply_by_linear(
            linear, _pointer(rows), len(rows), _pointer(result), _pointer(scratch)
        )
        return result


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    return {name: Parts(tmp_path_factory.mktemp("p"), flags) for name, flags in WIDTHS.items()}


def numbers(*shape: int, seed: int, exponents: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-exponents, exponents + 1, shape, generator=generator)
    return torch.randn(shape, generator=generator) * 2.0**powers


def fp32(exact: Fraction) -> Fraction:
    """To nearest, ties to even; what is below the least normal number becomes 0."""
    if exact == 0:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit
    return rounded if abs(rounded) >= Fraction(2) ** -126 else Fraction(0)


def test_products_of_bf16_pairs_are_summed_as_the_instruction_does(parts: dict[str, Parts]) -> None:
    """VDPBF16PS in Intel's manual: the odd product first, each addition rounded once, subnormal
    numbers taken and given as 0."""
    sums = numbers(60, LANES, seed=0, exponents=4)
    weights = numbers(60, LANES, 2, seed=1, exponents=4).bfloat16()
    pairs = numbers(60, 2, seed=2, exponents=4).bfloat16()
    sums[20:40] *= 2.0**-125  # around the least normal number
    weights[20:40] *= 2.0**-60
    pairs[20:40] *= 2.0**-66
    weights[40:, :, 0] *= 2.0**-126  # subnormal, beside an odd one that is not
    sums[:, 0], weights[:, 1] = -weights[:, 0, 1].float() * pairs[:, 1].float(), 0  # cancel

    result = parts["AVX-512"].dot_bf16(sums, weights, pairs)
    for n in range(60):
        even, odd = (fp32(Fraction(number)) for number in pairs[n].tolist())
        for lane in range(LANES):
            expected = fp32(Fraction(sums[n, lane].item()))
            even_weight, odd_weight = (fp32(Fraction(w)) for w in weights[n, lane].tolist())
            expected = fp32(expected + odd_weight * odd)
            expected = fp32(expected + even_weight * even)
            assert result[n, lane].item() == expected


def test_activations_are_rounded_to_the_nearest_bf16(parts: dict[str, Parts]) -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(3))
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000  # ties
    of_all_kinds = bits.int().view(torch.float32)
    rounded = parts["AVX-512"].round_bf16(of_all_kinds)
    assert torch.equal(rounded.isnan(), of_all_kinds.isnan())
    is_number = ~of_all_kinds.isnan()
    assert torch.equal(rounded[is_number], of_all_kinds.bfloat16()[is_number])


@pytest.mark.parametrize("number_format", [INT8, INT4], ids=lambda f: f.name)
def test_integers_give_the_same_bits_at_any_width(
    parts: dict[str, Parts], number_format: NumberFormat
) -> None:
    weights = pack(numbers(72, 208, seed=4), number_format)  # fills neither panels nor groups
    for num_rows in (1, 2, 5, 7, 12, 30):
        rows = numbers(num_rows, 208, seed=num_rows)
        narrow, wide = (parts[width].multiply(rows, weights) for width in WIDTHS)
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "fp8", "int8", "int4"])
def test_a_row_has_the_same_bits_in_tiles_of_any_height(parts: dict[str, Parts], kind: str) -> None:
    formats = {"fp8": FP8, "int8": INT8, "int4": INT4}
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    weight = numbers(72, 208, seed=5).to(dtypes.get(kind, torch.float32))
    weights, rows = pack(weight, formats.get(kind)), numbers(25, 208, seed=6)
    alone = torch.cat([parts["AVX-512"].multiply(row[None], weights) for row in rows])
    for num_rows in range(2, 26):
        beside = parts["AVX-512"].multiply(rows[:num_rows], weights)
        assert torch.equal(beside, alone[:num_rows])
    read = rows.bfloat16().float() if kind == "bf16" else rows
    # Integers multiply activations that are rounded to 16 bits.
    torch.testing.assert_close(alone, read @ weights.unpacked().float().T, atol=0.01, rtol=1e-5)


def test_the_emulated_kernels_say_what_they_are(tmp_path: Path) -> None:
    model = load_backend(make_tiny_model("llama", tmp_path), EMULATED)
    assert getattr(model, "instructions", None) == "avx512_bf16"


NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
CPUS = {
    "skylake": (("-march=skylake-avx512",), {"vpmaddwd", "vfmadd"}),
    "sapphire rapids": (("-march=sapphirerapids",), {"vdpbf16ps", "vpdpwssd"}),
    "zen 4": (
        ("-march=x86-64-v3", *(f"-m{name}" for name in (*NEEDED, "avx512bf16", "avx512vnni"))),
        {"vdpbf16ps", "vpdpwssd"},
    ),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64")
@pytest.mark.parametrize(("flags", "wanted"), CPUS.values(), ids=CPUS)
def test_they_compile_without_warnings_for_a_cpu_with_the_instructions(
    flags: tuple[str, ...], wanted: set[str], tmp_path: Path
) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    if subprocess.run(
        [compiler, *flags, "-E", "-x", "c", "/dev/null"], capture_output=True
    ).returncode:
        pytest.skip(f"{compiler} is older than {' '.join(flags)}: it cannot compile for such a CPU")
    assembly = tmp_path / "decoder.s"
    # Where the CPU has an instruction the macro emulates nothing; it saves the inlining's time.
    command = [compiler, *FLAGS, *EXTRA_FLAGS[EMULATED], *flags, "-Wall", "-Wextra", "-S"]
    source = str(SOURCE)
    result = subprocess.run([*command, source, "-o", assembly], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    used = assembly.read_text()
    assert {name for name in wanted if name in used} == wanted
    assert "%zmm" in used
