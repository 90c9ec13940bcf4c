"""Mappings of shared memory, aligned for huge pages."""

import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 2 << 20  # of a huge page; of another size there is nothing to gain, nor to lose
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


class Mapping(NamedTuple):
    """A file in memory, from a multiple of HUGE_BYTES on: the bytes of `memory` from `first` on."""

    memory: mmap.mmap
    first: int

    def array(self, num_bytes: int, at: int = 0) -> NDArray[np.uint8]:
        """The bytes from `at` on; the mapping goes with the last such array."""
        return np.frombuffer(self.memory, np.uint8, num_bytes, self.first + at)

    def advise(self, advice: int, start: int, num_bytes: int) -> None:
        """madvise of a part.  Raises OSError."""
        self.memory.madvise(advice, self.first + start, num_bytes)


def map_shared(fd: int, num_bytes: int, writable: bool) -> Mapping:
    """Map the first bytes of a file, shared, at a place where its huge pages are mapped as such.

    The kernel puts a mapping at any page unless it is told a place, and Python tells it none.  So
    Python takes room, and gives it back, too, and the file is mapped into it.
    Raises OSError.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags, prot)
    begin = np.frombuffer(room, np.uint8).ctypes.data
    first = -begin % HUGE_BYTES
    place = _mmap(begin + first, num_bytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if place != begin + first:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return Mapping(room, first)


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
