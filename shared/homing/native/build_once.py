"""Directories that are built once and then shared by every process that needs them.

Two engines that start together must not both convert a model, and none may see half of one: a
builder holds a lock, works beside the final place, and renames. What a crash leaves behind, the
next builder removes.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return `directory`; if it is not there, `build` fills a temporary one that is renamed."""
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.parent / f"{directory.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another builder; the kernel frees a dead one's
        if directory.is_dir():
            return directory
        prefix = f"{directory.name}.partial-"
        for leftover in directory.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return directory
