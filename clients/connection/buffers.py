"""Reusable memory for what a client yields: taken again only after its last tensor died."""

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

SMALL_BYTES = 256 << 10  # below, numpy's own allocator is as fast, and nothing is held alive
HUGE_PAGE_BYTES = 2 << 20
KEEP_BYTES = 512 << 20  # of unused buffers


ReadFiles = Callable[[Sequence[FileRange], NDArray[np.uint8]], None]


class Memory(ABC):
    """Where a reader lays batches out, one after the other; as it is, rows are copied at once."""

    def received(self, arena: NDArray[np.uint8], rows: list[tuple[RowArraySpec, int]]) -> None:
        """A batch begins; `rows`: how many of each array, if they come all at once."""
        del arena, rows  # nothing is set up before

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised, writable array."""

    def rows(self, spec: RowArraySpec, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array for rows that are gathered out of the arena."""
        del spec
        return self.empty(shape, dtype)

    def gathers(self, out: NDArray[np.uint8], first: int, addresses: NDArray[np.uint64]) -> bool:
        """Whether rows `first`, `first + 1`, ... of such an array need not be gathered here."""
        del out, first, addresses
        return False

    def after(self, release: Callable[[], None]) -> None:
        """Call `release` when nothing of the batch so far is in use in the arena."""
        release()

    def settle(self) -> bool:
        """Call what `after` was given, as the daemon may have no batch before that; whether some
        is still in use, and has to be asked for again soon."""
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
        """Bytes of buffers that wait for their next use."""
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
        # runs at any point of another call: it may append, never take out
        if self.unused_bytes() + len(memory) <= self.keep_bytes:
            self._unused.append(memory)


def _take_back(pool: "weakref.ref[BufferPool]", memory: mmap.mmap, pid: int) -> None:
    """Runs when an array over `memory` dies; in a forked child the pool is not ours."""
    owner = pool()
    if owner is not None and pid == os.getpid():
        owner._give_back(memory)
