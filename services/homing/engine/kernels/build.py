"""Compiles the C kernels with the compiler that is there, once per machine, source and flags.

Built on the user's machine and not into the wheel, because the code must fit the CPU's own vector
instructions: the plain x86-64 baseline is ten times slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
from pathlib import Path

from homing.engine.file_cache import build_once

SOURCE_DIR = Path(__file__).parent / "csrc"
MAIN_SOURCE = "decoder.c"
LIBRARY = "decoder.so"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    "-fno-math-errno",
    "-ffp-contract=off",  # what is fused is written so: flags must not change results
    "-Wno-psabi",
)


class NoCompiler(Exception):
    """There is no C compiler here, or it cannot build our source; the text says which and why."""


def load_library(
    cache_dir: Path,
    *,
    compilers: tuple[str, ...] = COMPILERS,
    extra_flags: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """The compiled kernels, from `cache_dir` or built into it. Raises NoCompiler.

    Load after torch: both then use the OpenMP runtime, and so the threads, that torch brought.
    """
    directory = cache_dir / "kernels" / _build_key(extra_flags)

    def compile_into(target: Path) -> None:
        compile_source(SOURCE_DIR / MAIN_SOURCE, target / LIBRARY, compilers, extra_flags)

    try:
        return ctypes.CDLL(str(build_once(directory, compile_into) / LIBRARY))
    except OSError as error:
        raise NoCompiler(f"cannot use {directory}: {error}") from None


def compile_source(
    source: Path,
    target: Path,
    compilers: tuple[str, ...] = COMPILERS,
    extra_flags: tuple[str, ...] = (),
) -> None:
    """Raises NoCompiler."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise NoCompiler(f"none of {', '.join(compilers)} is installed")
    command = [compiler, *FLAGS, *extra_flags, str(source), "-o", str(target), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise NoCompiler(f"{compiler} cannot build the kernels: {reason}")


def _build_key(extra_flags: tuple[str, ...]) -> str:
    """Differs wherever the library would: by source, flags, and what this CPU can do."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update("\0".join((*FLAGS, *extra_flags, platform.machine(), _cpu_features())).encode())
    return digest.hexdigest()


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
