"""How the allocator treats the buffers of large messages.

A prompt of 131,072 tokens is a buffer of half a megabyte, taken and freed within a millisecond.
By default glibc hands each such buffer back to the kernel, which costs about 150 page faults a
message: as much CPU time as all else that is done for it.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

KEPT_BYTES = 128 * 2**20
"""Freed memory that the process keeps at most at the top of its heap."""
HEAP_BYTES = 32 * 2**20
"""Buffers up to this size come from the heap: the most that glibc allows."""


def keep_large_buffers() -> None:
    """Reuse large buffers. Without glibc this does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES)
