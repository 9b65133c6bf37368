"""What is made on the machine that it runs on: C, compiled by the compiler that is there, and
directories that are built once, whichever process comes first."""

from homing.native.build_once import build_once
from homing.native.compiling import (
    COMPILERS,
    NoCompiler,
    build_key,
    built_library,
    compile_source,
    default_cache_dir,
)

__all__ = [
    "COMPILERS",
    "NoCompiler",
    "build_key",
    "build_once",
    "built_library",
    "compile_source",
    "default_cache_dir",
]
