"""Memory given back to the system, and got again at the same addresses.

Whoever points into a tensor, be it the C kernels or a view, need not know: the addresses stay, only
the pages behind them go.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import tempfile
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


def release(tensors: Iterable[Tensor]) -> int:
    """Give back the memory of contiguous tensors; they read as zeros from then on, but for the
    edges that share a page with something else. Returns the bytes given back."""
    released = 0
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= start:
            continue
        length = ctypes.c_size_t(end - start)
        if _libc.madvise(ctypes.c_void_p(start), length, mmap.MADV_DONTNEED) == 0:
            released += end - start
    trim()
    return released


def trim() -> None:
    """Give back what was freed, but kept for the next allocation."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class Spill:
    """Tensors in a file without a name: it goes when this object does, or the process."""

    def __init__(self) -> None:
        """In the directory for temporary files (`TMPDIR`), which should be on a disk."""
        self._file = tempfile.TemporaryFile(prefix="homing-")  # noqa: SIM115 - closed by `close`
        self.close = weakref.finalize(self, self._file.close)

    def write(self, tensor: Tensor) -> None:
        """Raises OSError when there is no room."""
        self._file.write(memoryview(_bytes(tensor.contiguous())))

    def rewind(self) -> None:
        self._file.flush()
        self._file.seek(0)

    def read(self, like: Tensor) -> Tensor:
        """The next tensor, which has the shape and dtype of `like`."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: Tensor) -> None:
        """The next tensor, into a contiguous one."""
        view = memoryview(_bytes(tensor))
        num_read = self._file.readinto(view)  # type: ignore[attr-defined]  # it is buffered
        if num_read != len(view):
            raise OSError(f"a file of offloaded memory ends {len(view) - num_read} bytes early")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
