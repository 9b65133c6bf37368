"""Loans: a long frame stays in its sender's memory, and only where it lies is sent.

A frame of half a megabyte is copied four times on its way through the coordinator: into and out of
the kernel, twice. On one machine that is most of what its request costs there. A sender lends it
instead: writes it into memory that has no name in any file system (memfd_create), and says where
that is. Who may read the sender's memory anyway, the same user, opens it by /proc. It is gone when
its sender is, and what that forked, whoever was killed meanwhile.

A file is lent again, for to get its pages costs more than to write them, but only after its reader
has answered. Each loan has a number of its own, which is looked at before and after what is lent is
copied: who comes too late finds another's number, and takes nothing.

A reader of another machine or container finds nothing there, and must say so.
"""

from __future__ import annotations

import os
import resource
import secrets
from itertools import count
from threading import Lock
from typing import Final

from homing.errors import LoanGone

MIN_LOAN_BYTES = 16384
"""Shorter ones cost less to send than to lend."""

MAX_LOAN_BYTES = 64 * 2**20

Place = tuple[int, int, int]
"""Process id, descriptor, number."""

_NAME: Final = "homing"
_NUMBER_BYTES: Final = 8
_MAX_FREE_BYTES: Final = 32 * 2**20
_MAX_FREE_FILES: Final = 64
_LOCAL: Final = ("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")


def may_lend(address: str) -> bool:
    """Whether who is reached at `address` is likely to see this process's loans."""
    return hasattr(os, "memfd_create") and address.startswith(_LOCAL)


class Lender:
    """Lends from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[_File] = []
        self._free_bytes = 0
        self._numbers = count(secrets.randbits(62))

    def lend(self, data: bytes) -> Loan | None:
        """None where it is better sent: it is short, or nothing can be lent."""
        if not MIN_LOAN_BYTES <= len(data) <= MAX_LOAN_BYTES:
            return None
        number = next(self._numbers)
        try:
            file = self._take() or _File()
            file.write(number, data)
        except OSError:
            return None
        return Loan(self, file, number)

    def take_back(self, file: _File) -> None:
        with self._lock:
            has_room = self._free_bytes + file.size <= _MAX_FREE_BYTES
            if has_room and len(self._free) < _MAX_FREE_FILES:
                self._free.append(file)
                self._free_bytes += file.size

    def _take(self) -> _File | None:
        with self._lock:
            if not self._free:
                return None
            file = self._free.pop()
            self._free_bytes -= file.size
            return file


class Loan:
    """What is lent for as long as this object is there, or until it is returned."""

    def __init__(self, lender: Lender, file: _File, number: int) -> None:
        self._lender = lender
        self._file: _File | None = file
        self.place: Place = (os.getpid(), file.descriptor, number)

    def returned(self) -> None:
        """Its reader has read it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            self._lender.take_back(file)


class _File:
    """A number and what is lent; closed when nobody refers to it any more."""

    descriptor = -1
    size = 0

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and self.descriptor >= soft // 2:
            raise OSError("the other half of the descriptors is for connections")

    def write(self, number: int, data: bytes) -> None:
        os.pwrite(self.descriptor, bytes(_NUMBER_BYTES), 0)
        view, end = memoryview(data), _NUMBER_BYTES
        while view:
            written = os.pwrite(self.descriptor, view, end)
            view, end = view[written:], end + written
        os.pwrite(self.descriptor, number.to_bytes(_NUMBER_BYTES), 0)
        self.size = max(self.size, end)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def borrow(place: Place, size: int) -> bytes:
    """A copy of what is lent there. Raises `LoanGone`; opens nothing that is no loan."""
    process, descriptor, number = place
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        file = _open(path)
        try:
            before = os.pread(file, _NUMBER_BYTES, 0)
            data = os.pread(file, size, _NUMBER_BYTES)
            after = os.pread(file, _NUMBER_BYTES, 0)
        finally:
            os.close(file)
    except (OSError, OverflowError, MemoryError) as error:
        raise LoanGone(f"nothing can be read at {path}: {error}") from None
    if not before == after == number.to_bytes(_NUMBER_BYTES) or len(data) != size:
        raise LoanGone(f"what is lent at {path} is something else by now")
    return data


def _open(path: str) -> int:
    """A descriptor, if it is a loan's file. What else it may be is not even opened: to look at
    what is there takes nothing but its place."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        itself = f"/proc/self/fd/{place}"
        if os.readlink(itself) != f"/memfd:{_NAME} (deleted)":
            raise LoanGone(f"nothing is lent at {path}")
        return os.open(itself, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)
