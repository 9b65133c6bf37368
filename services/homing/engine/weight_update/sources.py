"""Where new weights come from, as named tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from torch import Tensor

from homing.engine.models import Model
from homing.engine.models.checkpoint import weight_files
from homing.engine.weight_update.files import WeightFile
from homing.engine.weight_update.group import receive
from homing.engine.weight_update.staging import check_names
from homing.errors import InvalidRequest
from homing.wire import UpdateWeights, WeightSource

NamedTensors = Iterable[tuple[str, Tensor]]

MAX_MAPPED_BYTES = 4 * 2**30
"""So much is packed long before a lease of the mapped files would end, at 0.1 GB/s."""


@contextmanager
def open_source(update: UpdateWeights, model: Model, rank: int | None) -> Iterator[NamedTensors]:
    """The named tensors of an update, to be gone through once. Nobody changes them until the block
    ends; afterwards they are not to be read. `rank` is this engine's in the fleet.

    Raises ConfigError or InvalidRequest for a source that is not there, or not whole, or changes
    while it is read; what can be seen without the tensors is checked before there are any.
    """
    if update.source is WeightSource.GROUP:
        group = update.group
        if group is None or rank is None or rank not in group.ranks:
            raise InvalidRequest(f"the update's process group has no place for rank {rank}")
        shapes = {info.name: info.shape for info in group.tensors}
        check_names(model, shapes, partial=update.partial)
        yield receive(group, group.ranks.index(rank) + 1)
        return
    paths = _paths(update.path)
    before = _versions(paths)
    files = [WeightFile(path) for path in paths]
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    check_names(model, shapes, partial=update.partial)
    may_map = sum(file.num_bytes for file in files) <= MAX_MAPPED_BYTES
    with ExitStack() as stack:
        opened = (stack.enter_context(file.opened(may_map=may_map)) for file in files)
        yield chain.from_iterable(opened)
        # Before the leases end: whoever waits to write goes on then.
        if _versions(paths) != before:
            raise InvalidRequest(f"{update.path} was written to while it was read")


def _paths(path: str) -> list[Path]:
    if not path:
        raise InvalidRequest("the update names no path")
    place = Path(path)
    if place.is_dir():
        return weight_files(place)
    if not place.is_file():
        raise InvalidRequest(f"{path} is neither a directory nor a file")
    return [place]


def _versions(paths: list[Path]) -> Mapping[Path, tuple[int, int, int]]:
    """Differs when a file was written to or replaced."""
    stats = {path: os.stat(path) for path in paths}
    return {path: (s.st_ino, s.st_size, s.st_mtime_ns) for path, s in stats.items()}
