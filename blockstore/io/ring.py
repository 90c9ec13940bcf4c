"""io_uring: many reads of a thread in flight at once, where kernel and container allow it."""

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.closing import Closing
from blockstore.kernels.reads import ENTRY_WORDS, NO_RING, ReadQueue, RingPlaces

DEPTH = 64  # reads of one thread in flight
MAX_PIECES = 512  # of one call of `read_pieces`
_SYS_SETUP = 425  # of every architecture
_SINGLE_MMAP = 1  # a feature, of Linux 5.4
_RING, _ENTRIES = 0, 0x1000_0000  # what a mapping at this offset shows
_PARAMS = 30  # words of `struct io_uring_params`
_SUBMITTED, _COMPLETED = 10, 20  # words where its offsets of the two rings begin


class QueueOwner(Closing):
    """The read queue of one thread.

    queue     for `read_pieces`
    refusal   why io_uring is not used, or ""
    """

    def __init__(self) -> None:
        self.refusal, fd = "", NO_RING
        words, entries = np.empty(0, np.uint32), np.empty(0, np.uint64)
        places = RingPlaces(0, 0, 0, 0, 0, 0)
        try:
            fd, words, entries, places = _set_up()
        except OSError as error:
            self.refusal = f"io_uring is refused ({error.strerror})"
        self.queue = ReadQueue(
            fd, words, entries, places, np.empty(2 * MAX_PIECES, np.uint64),
            np.empty(MAX_PIECES + 1, np.int64), np.empty(MAX_PIECES, np.bool_),
        )  # fmt: skip

    def close(self) -> None:
        """Give the ring back; nothing is read through it any more."""
        if self.queue.fd != NO_RING:
            os.close(self.queue.fd)
            self.queue = self.queue.without_ring()


def _set_up() -> tuple[int, NDArray[Any], NDArray[Any], RingPlaces]:
    """A ring: its descriptor, what it shares with the kernel, and where in that each word lies.

    Raises OSError: none is available.
    """
    library = ctypes.CDLL(None, use_errno=True)
    raw = (ctypes.c_uint32 * _PARAMS)()
    fd = int(library.syscall(_SYS_SETUP, DEPTH, raw))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    params = list(raw)
    num_entries, num_completions, features = params[0], params[1], params[5]
    sent, done = params[_SUBMITTED:], params[_COMPLETED:]
    try:
        if not features & _SINGLE_MMAP:
            raise OSError(0, "Linux is older than 5.4")
        size = max(sent[6] + 4 * num_entries, done[5] + 16 * num_completions)
        shared = mmap.mmap(fd, size, mmap.MAP_SHARED, offset=_RING)
        room = mmap.mmap(fd, 8 * ENTRY_WORDS * num_entries, mmap.MAP_SHARED, offset=_ENTRIES)
    except BaseException:
        os.close(fd)
        raise
    words = np.frombuffer(shared, np.uint32, size // 4)
    # entry i is always in place i of the ring: the tail alone tells which one is next
    words[sent[6] // 4 :][:num_entries] = np.arange(num_entries, dtype=np.uint32)
    places = RingPlaces(
        sent[1] // 4, num_entries - 1, done[0] // 4, done[1] // 4, num_completions - 1, done[5] // 4
    )
    return fd, words, np.frombuffer(room, np.uint64), places
