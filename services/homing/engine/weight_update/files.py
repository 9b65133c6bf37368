"""Reads safetensors files whole, into memory of their own.

Not by mapping them, as a model is loaded: mapping a file of shared memory costs more than copying
it, and a file that gets shorter under a mapping ends the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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
        view = memoryview(data.numpy().data)
        with self._path.open("rb") as file, ThreadPoolExecutor(torch.get_num_threads()) as pool:

            def fill(start: int) -> None:
                end = min(start + PIECE_BYTES, len(view))
                while start < end:
                    piece = view[start:end]
                    num_read = os.preadv(file.fileno(), [piece], self._data_start + start)
                    if num_read == 0:
                        raise InvalidRequest(f"{self._path} became shorter while it was read")
                    start += num_read

            list(pool.map(fill, range(0, len(view), PIECE_BYTES)))


def _entry(name: str, facts: dict[str, Any]) -> _Entry:
    if facts["dtype"] not in _DTYPES:
        raise InvalidRequest(f"{name} is of {facts['dtype']}; it must be of a float dtype")
    return _Entry(_DTYPES[facts["dtype"]], tuple(facts["shape"]), *facts["data_offsets"])
