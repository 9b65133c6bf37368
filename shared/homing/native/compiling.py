"""Compiles C with the compiler that is there, once per machine, source and flags.

On the user's machine and not into the wheel: what is compiled fits the CPU and the Python that are
there, and a wheel serves all.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from homing.errors import ConfigError
from homing.native.build_once import build_once

COMPILERS = ("cc", "gcc", "clang")


class NoCompiler(Exception):
    """There is no C compiler here, or it cannot build our source; the text says which and why."""


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`$HOMING_CACHE_DIR`, else `homing` in the user's cache directory (XDG base directories).
    Raises `ConfigError` for a user without a home."""
    if own := environ.get("HOMING_CACHE_DIR"):
        return Path(own)
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "homing"
    try:
        return Path.home() / ".cache" / "homing"
    except RuntimeError:
        raise ConfigError("this user has no home directory: set HOMING_CACHE_DIR") from None


def built_library(
    source: Path,
    cache_dir: Path,
    flags: Sequence[str],
    compilers: Sequence[str] = COMPILERS,
) -> Path:
    """The library of `source`, which may include what lies beside it: from `cache_dir`, or built
    into it. Raises NoCompiler."""
    key = build_key(source.parent.iterdir(), flags)
    directory, library = cache_dir / "kernels" / key, f"{source.stem}.so"

    def compile_into(target: Path) -> None:
        compile_source(source, target / library, flags, compilers)

    try:
        return build_once(directory, compile_into) / library
    except OSError as error:
        raise NoCompiler(f"cannot use {directory}: {error}") from None


def compile_source(
    source: Path, target: Path, flags: Sequence[str], compilers: Sequence[str] = COMPILERS
) -> None:
    """Raises NoCompiler."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise NoCompiler(f"none of {', '.join(compilers)} is installed")
    command = [compiler, *flags, str(source), "-o", str(target), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise NoCompiler(f"{compiler} cannot build {source.name}: {reason}")
    if not target.is_file():
        raise NoCompiler(f"{compiler} built nothing of {source.name}")


def build_key(sources: Iterable[Path], flags: Sequence[str]) -> str:
    """Differs wherever the library would: by source, flags, and what this CPU can do."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(sources):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update("\0".join((*flags, platform.machine(), _cpu_features())).encode())
    return digest.hexdigest()


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
