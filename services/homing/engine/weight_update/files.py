"""Reads safetensors files whole, into memory of their own.

Mapping a file and copying from there takes less than half as long as reading it. But a file that
gets shorter under a mapping ends the process, so it is mapped only under a lease, during which the
system makes whoever wants to shorten it wait.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from homing.engine.weight_update.arena import Arena
from homing.errors import InvalidRequest

PIECE_BYTES = 16 * 2**20
"""Read by one thread at a time."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


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

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """All of its tensors. Raises InvalidRequest if it has become shorter."""
        data = Arena(max((entry.end for entry in self._entries.values()), default=0)).memory
        self._fill(data)
        for name, entry in self._entries.items():
            raw = data[entry.start : entry.end]
            if entry.start % entry.dtype.itemsize:
                raw = raw.clone()
            yield name, raw.view(entry.dtype).view(entry.shape)

    def _fill(self, data: Tensor) -> None:
        with self._path.open("rb") as file:
            if not _lease(file):
                self._read_into(data, file)
                return
            if os.fstat(file.fileno()).st_size < self._data_start + len(data):
                raise InvalidRequest(f"{self._path} became shorter before it was read")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
                # Of numpy, since torch would keep the mapping from being closed for a while.
                there = np.frombuffer(mapped, np.uint8, len(data), self._data_start)
                data.copy_(torch.from_numpy(there))
                del there

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


def _entry(name: str, facts: dict[str, Any]) -> _Entry:
    if facts["dtype"] not in _DTYPES:
        raise InvalidRequest(f"{name} is of {facts['dtype']}; it must be of a float dtype")
    return _Entry(_DTYPES[facts["dtype"]], tuple(facts["shape"]), *facts["data_offsets"])
