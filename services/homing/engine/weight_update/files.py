"""Safetensors files, of which each tensor is gone through once: read where they are.

A file is mapped, which takes half as long as copying it and no memory. But one that gets shorter
under a mapping ends the process, and one that is written to would change what was checked already.
So it is mapped only under a lease, during which the system makes whoever wants to write wait; else
it is read into memory of its own.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from homing.engine.weight_update.arena import ALIGNMENT, Arena
from homing.errors import InvalidRequest

PIECE_BYTES = 16 * 2**20
"""Read by one thread at a time."""

HEADER_BYTES = 256 * 2**10
"""What a file that is written here has before its data, in whole pages: room for 2,000 parameters.
It is reserved before their names are known, and more of it would take longer to read."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes `[start, end)` of the data
    end: int


class WeightFile:
    """Format: a length of 8 bytes, little-endian, so much JSON, and the data it speaks of."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest for what is no safetensors file, or only the beginning of one."""
        try:
            with safe_open(str(path), "pt"):  # checks sizes, and that the tensors cover the data
                pass
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_bytes))
        except (OSError, ValueError, SafetensorError) as error:
            raise InvalidRequest(f"{path} is not a safetensors file: {error}") from None
        header.pop("__metadata__", None)
        self._path = path
        self._entries = {name: _entry(name, facts) for name, facts in header.items()}
        self._data_start = 8 + header_bytes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    @property
    def num_bytes(self) -> int:
        """Of the data."""
        return max((entry.end for entry in self._entries.values()), default=0)

    @contextmanager
    def opened(self, *, may_map: bool) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """All of its tensors, which nobody changes until the block ends, and which are not to be
        read afterwards. Raises InvalidRequest if it has become shorter."""
        with self._path.open("rb") as file:
            if may_map and _lease(file):
                try:
                    yield self._tensors(self._mapped(file))
                finally:
                    _end_lease(file)
            else:
                yield self._tensors(self._read(file))

    def _tensors(self, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, entry in self._entries.items():
            raw = data[entry.start : entry.end]
            if raw.data_ptr() % entry.dtype.itemsize or entry.start % entry.dtype.itemsize:
                raw = raw.clone()
            yield name, raw.view(entry.dtype).view(entry.shape)

    def _mapped(self, file: BinaryIO) -> Tensor:
        """The data where it is. The mapping ends with the last tensor of it."""
        if os.fstat(file.fileno()).st_size < self._data_start + self.num_bytes:
            raise InvalidRequest(f"{self._path} became shorter before it was read")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.from_numpy(np.frombuffer(mapped, np.uint8, self.num_bytes, self._data_start))
        if len(data):
            data[:: mmap.PAGESIZE].amax()  # has the system map the pages, for several threads
        return data

    def _read(self, file: BinaryIO) -> Tensor:
        # AMD's Zen 3 copies at a quarter of its speed to where the place in the page is by 8 to 31
        # bytes higher than that in the file's page.
        start = self._data_start % ALIGNMENT
        data = torch.from_numpy(Arena(start + self.num_bytes).memory.numpy()[start:])
        self._read_into(data, file)
        return data

    def _read_into(self, data: Tensor, file: BinaryIO) -> None:
        view = memoryview(data.numpy().data)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:

            def fill(start: int) -> None:
                end = min(start + PIECE_BYTES, len(view))
                while start < end:
                    piece = view[start:end]
                    num_read = os.preadv(file.fileno(), [piece], self._data_start + start)
                    if num_read == 0:
                        raise InvalidRequest(f"{self._path} became shorter while it was read")
                    start += num_read

            list(pool.map(fill, range(0, len(view), PIECE_BYTES)))


def _lease(file: BinaryIO) -> bool:
    """Whether nobody can shorten the file, or write to it, until it is closed here. They wait, for
    `/proc/sys/fs/lease-break-time` at most, which is 45 s. Not for files of others, of some file
    systems, or that somebody has open for writing."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        # The signal that tells of who waits would end the process by default.
        fcntl.fcntl(file.fileno(), fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def _end_lease(file: BinaryIO) -> None:
    # By itself it would last as long as the mapping. Who waited too long has ended it already.
    with suppress(OSError):
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _entry(name: str, facts: dict[str, Any]) -> _Entry:
    if facts["dtype"] not in _DTYPES:
        raise InvalidRequest(f"{name} is of {facts['dtype']}; it must be of a float dtype")
    return _Entry(_DTYPES[facts["dtype"]], tuple(facts["shape"]), *facts["data_offsets"])


def write_file(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write each tensor as it comes: the next one may have the same memory. Raises InvalidRequest
    for a name that comes twice, for a dtype that is no float, and for too many names."""
    header: dict[str, dict[str, Any]] = {}
    with path.open("wb") as file:
        file.seek(HEADER_BYTES)
        for name, tensor in tensors:
            if name in header:
                raise InvalidRequest(f"parameter {name!r} comes twice")
            if tensor.dtype not in _NAME_OF:
                raise InvalidRequest(f"{name} is of {tensor.dtype}; it must be of a float dtype")
            start = file.tell() - HEADER_BYTES
            file.write(_bytes_of(tensor))
            header[name] = {
                "dtype": _NAME_OF[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, file.tell() - HEADER_BYTES],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        if len(text) > room:
            raise InvalidRequest(
                f"the {len(header):,} parameters' names and shapes take {len(text):,} bytes; there "
                f"is room for {room:,}"
            )
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
