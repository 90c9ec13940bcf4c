"""Arrays of a pack being written: records page by page, rows block by block in any order."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, RowArray, crc_path, row_geometry, shard_path
from blockstore.io.buffers import byte_view
from blockstore.io.files import open_to_write, write_exact
from blockstore.kernels.crc import page_crcs
from blockstore.store import shard_index
from blockstore.writer import StoreWriter
from loaderd.sampling.packed.format import page_array
from preprocess.files.array_file import reserve


class PagesWriter:
    """Pages appended to an array that has as many as there come to be."""

    def __init__(self, writer: StoreWriter, path: str) -> None:
        self._writer, self._path = writer, path
        self._per_block = writer.block_bytes // PAGE_BYTES
        self._sink = writer.sink(path, 2, self._per_block * PAGE_BYTES)
        self._slot: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._left = self._pages = 0

    def append(self, raw: NDArray[np.uint8]) -> None:
        """Whole pages, any number; they are copied."""
        done = 0
        while done < raw.size:
            if self._left == 0:
                self._slot = self._sink.next_slot()
                self._left = self._slot.size
            count, start = min(raw.size - done, self._left), self._slot.size - self._left
            self._slot[start : start + count] = raw[done : done + count]
            self._left -= count
            done += count
        self._pages += raw.size // PAGE_BYTES

    def close(self) -> RowArray:
        """All pages are there.  Raises OutOfSpace."""
        if self._left:
            self._slot[self._slot.size - self._left :] = 0
        array = page_array(self._path, self._pages, self._writer.block_bytes)
        geometry = row_geometry(array, self._writer.block_bytes)
        _, crcs = self._sink.close(geometry.chunk_bytes)
        self._writer.bind(self._writer.tree.rows(array, geometry))
        self._writer.side(crc_path(self._path), crcs)
        return array


class BlocksWriter:
    """Blocks of a row array, in any order, by any number of threads."""

    def __init__(self, writer: StoreWriter, root: Path, array: RowArray) -> None:
        """`root`: of the folder that is written.  Raises OutOfSpace."""
        self._writer, self._root, self._array = writer, root, array
        self.geometry = g = row_geometry(array, writer.block_bytes)
        writer.bind(writer.tree.rows(array, g))
        self._crcs = np.zeros(g.num_pages, np.uint32)
        self._fds: list[int] = []
        for shard in range(g.num_shards):
            fd, _ = open_to_write(Path(self._name(shard)))
            self._fds.append(fd)
            reserve(fd, self._held(shard) * g.slot_bytes, self._name(shard))

    def _held(self, shard: int) -> int:
        g = self.geometry
        return min(g.num_blocks - shard * g.blocks_per_shard, g.blocks_per_shard)

    def _name(self, shard: int) -> str:
        return str(
            self._root / shard_path(self._array.path, shard, 1 + len(self._array.row_shape))
        )  # fmt: skip

    def put(self, block: int, slot: NDArray[np.uint8]) -> None:
        """uint8 (slot_bytes,), page-aligned.  Raises OutOfSpace."""
        g = self.geometry
        page_crcs(slot, g.pages_per_block, self._crcs[block * g.pages_per_block :])
        shard, offset = g.locate(block)
        write_exact(self._fds[shard], byte_view(slot), offset, self._name(shard))

    def close(self) -> None:
        """All blocks are there.  Raises OutOfSpace."""
        self.abort()
        g = self.geometry
        for shard in range(g.num_shards):
            name, held = self._name(shard), self._held(shard)
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC)  # what follows is not page-sized
            try:
                raw = shard_index(g, held)
                write_exact(fd, memoryview(raw), held * g.slot_bytes, name)
            finally:
                os.close(fd)
        self._writer.side(crc_path(self._array.path), self._crcs)

    def abort(self) -> None:
        """Close the files as they are; what waits is not written."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> "BlocksWriter":
        return self

    def __exit__(self, kind: object, *_error: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
