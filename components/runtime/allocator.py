"""The C allocator told to keep memory that was freed, for work that soon asks for as much again.

By default glibc gives an array of a megabyte back to the kernel, which hands out the next one page by page, each filled
with zeros. Who keeps how much, and what it gains, is said where it is asked for. What one phase of a work freed is no
use to the next one's: it can be given back between them.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names and numbers of glibc's malloc.h."""
LARGEST_KEPT = 32 << 20
"""Bytes of one array; glibc takes no more."""
KEPT = 2 * LARGEST_KEPT
"""Bytes in all, as glibc itself chooses once it has given back an array of the largest size."""


def keep_freed_memory(kept: int = KEPT) -> bool:
    """Lets the process keep `kept` bytes that are free; whether the C library took it, which others than glibc do not.

    A process of several threads keeps as much for each of the library's arenas.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, kept))


def give_back_freed_memory() -> bool:
    """Gives the kernel what is free now; whether there was any, and the C library knows how."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    return bool(malloc_trim(0))
