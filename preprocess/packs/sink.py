"""Arrays of a pack being written: records page by page, rows block by block in any order."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray, row_geometry, shard_path
from blockstore.io.buffers import byte_view
from blockstore.io.files import open_to_write, write_exact
from blockstore.kernels.crc import page_crcs
from blockstore.writer import RowBlocks, StoreWriter
from loaderd.sampling.packed.format import page_array
from preprocess.files.array_file import reserve


class PagesWriter(RowBlocks):
    """Pages, uint8 (pages, 4096), appended to an array that has as many as there come to be."""

    def __init__(self, writer: StoreWriter, path: str) -> None:
        array = page_array(path, 0, writer.block_bytes)
        geometry = row_geometry(array, writer.block_bytes)
        super().__init__(writer.sink(path, 2, geometry.slot_bytes), array, geometry)
        self._writer = writer

    def close(self) -> None:
        """All pages are there.  Raises OutOfSpace."""
        array = page_array(self._array.path, self.num_rows, self._writer.block_bytes)
        self._writer.begin_parts(array)
        self._writer.end_parts(array, self.end())


class BlocksWriter:
    """Blocks of a row array, in any order, by any number of threads."""

    def __init__(self, writer: StoreWriter, array: RowArray) -> None:
        """Raises OutOfSpace."""
        self._writer, self._array = writer, array
        self.geometry = g = row_geometry(array, writer.block_bytes)
        writer.begin_parts(array)
        self._crcs = np.zeros(g.num_pages, np.uint32)
        self._names = [
            str(writer.folder / shard_path(array.path, shard, 1 + len(array.row_shape)))
            for shard in range(g.num_shards)
        ]
        self._fds: list[int] = []
        for shard, name in enumerate(self._names):
            fd, _ = open_to_write(Path(name))
            self._fds.append(fd)
            reserve(fd, g.blocks_in(shard) * g.slot_bytes, name)

    def put(self, block: int, slot: NDArray[np.uint8]) -> None:
        """uint8 (slot_bytes,), page-aligned.  Raises OutOfSpace."""
        g = self.geometry
        page_crcs(slot, g.pages_per_block, self._crcs[block * g.pages_per_block :])
        shard, offset = g.locate(block)
        write_exact(self._fds[shard], byte_view(slot), offset, self._names[shard])

    def __enter__(self) -> "BlocksWriter":
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        """All blocks are there, unless there was an error.  Raises OutOfSpace."""
        while self._fds:
            os.close(self._fds.pop())
        if kind is None:
            self._writer.end_parts(self._array, self._crcs)
