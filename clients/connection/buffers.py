"""Reusable memory for a client's batches: reused only after the last tensor over it died."""

import contextlib
import math
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from blockstore.store import FileRange
from loaderd.api.contents import RowArraySpec

SMALL_BYTES = 256 << 10  # below, numpy's own allocator is as fast, and keeps nothing alive
HUGE_PAGE_BYTES = 2 << 20
KEEP_BYTES = 512 << 20  # unused buffers that are kept for reuse


ReadFiles = Callable[[Sequence[FileRange], NDArray[np.uint8]], None]


class Memory(ABC):
    """Memory that a reader lays batches out in, one by one; by default rows are copied at once."""

    def received(self, arena: NDArray[np.uint8], rows: list[tuple[RowArraySpec, int]]) -> None:
        """Called as a batch begins; `rows`: how many of each array, if all come at once."""
        del arena, rows  # nothing to prepare

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised, writable array."""

    def rows(self, spec: RowArraySpec, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array for rows that are gathered out of the arena."""
        del spec
        return self.empty(shape, dtype)

    def gathers(self, out: NDArray[np.uint8], first: int, addresses: NDArray[np.uint64]) -> bool:
        """Whether this memory gathers rows `first`, ... of such an array itself, later."""
        del out, first, addresses
        return False

    def after(self, release: Callable[[], None]) -> None:
        """Call `release` once what was read of the batch so far is no longer used in the arena."""
        release()

    def settle(self) -> bool:
        """Call releases given to `after` that are due: the daemon may need them before its next
        batch.  Returns whether some are still in use, so that the caller has to ask again soon."""
        return False

    def filed(
        self, ranges: list[FileRange], read: ReadFiles, shape: tuple[int, ...], dtype: DTypeLike
    ) -> NDArray[Any]:
        """An array that lies in these ranges of files; `read` brings them to host memory."""
        out = self.empty(shape, dtype)
        read(ranges, out.reshape(-1).view(np.uint8))
        return out


class BufferPool(Memory):
    """Anonymous memory on huge pages, handed out as arrays and taken back when they die.

    A first touch of fresh pages is many times slower than a reused one.  Each array has a buffer
    of its own, so that a label kept over an epoch does not hold features alive.
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self.keep_bytes = keep_bytes
        self.num_mapped = 0
        self._unused: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised, writable array; its memory is reused after its last view is gone."""
        count, kind = math.prod(shape), np.dtype(dtype)
        num_bytes = count * kind.itemsize
        if num_bytes < SMALL_BYTES:
            return np.empty(shape, kind)
        memory = self._take(num_bytes)
        array: NDArray[Any] = np.frombuffer(memory, kind, count)
        finalizer = weakref.finalize(array, _take_back, weakref.ref(self), memory, os.getpid())
        finalizer.atexit = False
        return array.reshape(shape)

    def unused_bytes(self) -> int:
        """Bytes of the buffers kept for reuse."""
        return sum(len(memory) for memory in self._unused)

    def _take(self, num_bytes: int) -> mmap.mmap:
        # an eighth of slack: the batches of a plan differ a little in size
        grain = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else SMALL_BYTES
        room = -(-(num_bytes + num_bytes // 8) // grain) * grain
        fitting = [m for m in self._unused if num_bytes <= len(m) <= 2 * room]
        if fitting:
            best = min(fitting, key=len)
            self._unused.remove(best)
            return best
        while self._unused and self.unused_bytes() + room > self.keep_bytes:
            self._unused.pop(0)
        memory = mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.num_mapped += 1
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        # a finalizer runs in the middle of any other call: it may append, but never remove
        if self.unused_bytes() + len(memory) <= self.keep_bytes:
            self._unused.append(memory)


def _take_back(pool: "weakref.ref[BufferPool]", memory: mmap.mmap, pid: int) -> None:
    """Runs when an array over `memory` dies; in a forked child the pool is not ours."""
    owner = pool()
    if owner is not None and pid == os.getpid():
        owner._give_back(memory)
