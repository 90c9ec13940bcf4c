"""Freed memory goes back to the system, so that --mem bounds what a process holds."""

import ctypes

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's mallopt
_LARGE_BYTES = 1 << 18


def give_back_freed() -> None:
    """Arrays from 256 KiB on are mapped one by one, and unmapped when they are freed.

    Left alone, glibc keeps freed arrays of up to 32 MiB in heaps, one for each thread.  Nothing
    happens under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_ARENA_MAX, 2)
