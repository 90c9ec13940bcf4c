"""The files of a pack: opened, checked, and read in order through the threads of the daemon."""

import hashlib
import mmap
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.closing import Closing
from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES, BlockGeometry, RowArray, crc_path, row_geometry
from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact
from blockstore.io.reader import BlockReader
from blockstore.io.reading import Reading
from blockstore.store import BlockedFile, find_shards
from loaderd.sampling.packed.format import Pack

_RUN_PAGES = 256  # most pages that one thread reads at once
_PIECE = 1 << 20


class PageCrcs:
    """Checksums of the pages of one array: only those that are being read take memory.

    A pack has many pages, and needs each once an epoch.  One thread at a time calls.
    """

    def __init__(self, path: Path, count: int) -> None:
        """`path`: of a side array of `count` uint32; it is not opened if `count` is 0."""
        self._path, self._map = str(path), mmap.mmap(-1, max(4 * count, mmap.PAGESIZE))
        self.crcs: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, count)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if count else -1
        self._users = 0  # of what was loaded
        self._low, self._high = count, 0

    def load(self, first: int, stop: int) -> None:
        """Load those of pages [first, stop), until `drop`.  Raises CorruptBlock, OSError."""
        read_exact(self._fd, [byte_view(self.crcs[first:stop])], 4 * first, self._path)
        self._users += 1
        self._low, self._high = min(self._low, first), max(self._high, stop)

    def drop(self) -> None:
        """End the use of one `load`; memory is freed when nothing is used."""
        self._users -= 1
        if self._users == 0 and self._low < self._high:
            low, high = 4 * self._low // mmap.PAGESIZE, -(-4 * self._high // mmap.PAGESIZE)
            self._map.madvise(mmap.MADV_DONTNEED, low * mmap.PAGESIZE, (high - low) * mmap.PAGESIZE)
            self._low, self._high = self.crcs.size, 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PackedArray(NamedTuple):
    """One array of a pack, as its reader numbers it."""

    number: int
    geometry: BlockGeometry
    crcs: PageCrcs


class PackFiles(Closing):
    """All arrays of a pack."""

    def __init__(self, folder: Path, pack: Pack, reader: BlockReader) -> None:
        """`reader`: of the store, whose threads and memory are used.

        Raises CorruptBlock: a file is missing, or not the one that was written; OSError.
        """
        self._stack = ExitStack()
        self._arrays: dict[str, PackedArray] = {}
        root, files = os.path.realpath(folder), list[BlockedFile]()
        try:
            for name, expected in pack.files.items():
                check_bound(folder / name, expected)
            for number, array in enumerate(pack.arrays()):
                geometry = row_geometry(array, pack.block_bytes)
                crcs = PageCrcs(folder / crc_path(array.path) / "c/0", geometry.num_pages)
                self._stack.callback(crcs.close)
                shards = find_shards(root, array.path, geometry, 1 + len(array.row_shape))
                files.append(BlockedFile(array.path, geometry, shards, crcs.crcs))
                self._arrays[array.path] = PackedArray(number, geometry, crcs)
            self.reader = self._stack.enter_context(reader.beside(files))
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Close the files, which nobody is reading."""
        self._stack.close()

    def begin(self, array: RowArray, runs: NDArray[np.int64], places: NDArray[np.int64]) -> Reading:
        """Begin to read runs of pages of an array, which ascend, to bytes of the memory.

        Raises CorruptBlock, OSError: their checksums cannot be read.
        """
        found = self._arrays[array.path]
        found.crcs.load(*_bounds(found.geometry, runs))
        return self.reader.fetch(found.number, runs, places)

    def ended(self, array: RowArray) -> None:
        """The pages that one `begin` asked for are there, or have failed."""
        self._arrays[array.path].crcs.drop()

    def pages(self, array: RowArray, first: int, stop: int) -> NDArray[np.int64]:
        """Pages [first, stop) of an array without gaps as runs: int64 (runs, 3)."""
        g, runs = self._arrays[array.path].geometry, []
        per_shard = g.blocks_per_shard * g.pages_per_block
        while first < stop:
            shard, page = divmod(first, per_shard)
            count = min(stop - first, _RUN_PAGES, per_shard - page)
            runs.append((shard, page, count))
            first += count
        return np.array(runs, np.int64).reshape(-1, 3)

    def blocks(self, array: RowArray, first: int, rows: int) -> NDArray[np.int64]:
        """The blocks of `rows` rows from block `first` on as runs, no page without a row."""
        g = self._arrays[array.path].geometry
        count = -(-rows // g.rows_per_block)
        blocks = np.arange(first, first + count)
        held = np.minimum(g.rows_per_block, rows - np.arange(count) * g.rows_per_block)
        runs = np.empty((count, 3), np.int64)
        runs[:, 0], within = np.divmod(blocks, g.blocks_per_shard)
        runs[:, 1] = within * g.pages_per_block
        runs[:, 2] = -(-held * array.row_bytes // PAGE_BYTES)
        return runs


def _bounds(geometry: BlockGeometry, runs: NDArray[np.int64]) -> tuple[int, int]:
    """The first page of runs, and the end of the last, in the whole array."""
    if not len(runs):
        return 0, 0
    per_shard = geometry.blocks_per_shard * geometry.pages_per_block
    (shard, page, _), (last, start, count) = runs[0].tolist(), runs[-1].tolist()
    return shard * per_shard + page, last * per_shard + start + count


def check_bound(path: Path, expected: str) -> None:
    """Check a file's digest.  Raises CorruptBlock: it is missing, or not what was written."""
    total = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                total.update(piece)
    except OSError as error:
        raise CorruptBlock(f"{path}: {error.strerror}, expected a file of packed epochs") from error
    if total.hexdigest() != expected:
        raise CorruptBlock(
            f"{path}: digest {total.hexdigest()}, expected {expected}; the file was changed: "
            "remove the folder, and pack again"
        )


def place_of(memory: NDArray[np.uint8], data: NDArray[Any]) -> int:
    """The first byte of a piece of memory, as a place in `data`."""
    return int(memory.ctypes.data - data.ctypes.data)
