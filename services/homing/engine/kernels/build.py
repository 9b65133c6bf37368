"""The C kernels, compiled on the machine that runs them: they must fit the CPU's own vector
instructions, for the plain x86-64 baseline is ten times slower."""

from __future__ import annotations

import ctypes
from pathlib import Path

from homing.native import COMPILERS, NoCompiler, built_library

SOURCE = Path(__file__).parent / "csrc" / "decoder.c"
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    "-fno-math-errno",
    "-ffp-contract=off",  # what is fused is written so: flags must not change results
    "-Wno-psabi",
)


def load_library(
    cache_dir: Path,
    *,
    compilers: tuple[str, ...] = COMPILERS,
    extra_flags: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """The compiled kernels, from `cache_dir` or built into it. Raises NoCompiler.

    Load after torch: both then use the OpenMP runtime, and so the threads, that torch brought.
    """
    library = built_library(SOURCE, cache_dir, (*FLAGS, *extra_flags), compilers)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoCompiler(f"cannot use {library}: {error}") from None
