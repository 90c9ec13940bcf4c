"""How the C library keeps memory for the threads of a daemon."""

import ctypes

_M_ARENA_MAX = -8  # of glibc's malloc.h
_ARENAS = 2


def share_heaps() -> None:
    """Let all threads that begin from now on share two heaps; without glibc nothing is done.

    Each of many threads would have a heap of its own, which keeps what the thread's busiest moment
    took.  Hot paths allocate nothing, so that threads do not wait for each other.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, _ARENAS)
