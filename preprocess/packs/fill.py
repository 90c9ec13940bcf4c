"""Write the arrays of a pack: records by pages, and rows of the store, read once, by groups."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import BlockGeometry, RowArray, row_geometry, shard_path
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.files import open_to_write, write_exact
from blockstore.kernels.crc import page_crcs
from blockstore.kernels.rows import gather_rows
from blockstore.store import Store, scan_blocks
from blockstore.writer import RowBlocks, StoreWriter
from loaderd.sampling.packed.format import page_array
from preprocess.files.ahead import read_ahead
from preprocess.files.array_file import ArrayFile, reserve
from preprocess.packs.plan import PackMemory
from preprocess.pipeline.renderings import PassProgress


class PagesWriter(RowBlocks):
    """Appends pages, uint8 (pages, 4096), to an array whose length is known at the end."""

    def __init__(self, writer: StoreWriter, path: str) -> None:
        array = page_array(path, 0, writer.block_bytes)
        geometry = row_geometry(array, writer.block_bytes)
        super().__init__(writer.sink(path, 2, geometry.slot_bytes), array, geometry)
        self._writer = writer

    def close(self) -> None:
        """Finish the array after the last page.  Raises OutOfSpace."""
        array = page_array(self._array.path, self.num_rows, self._writer.block_bytes)
        self._writer.begin_parts(array)
        self._writer.end_parts(array, self.end())


class BlocksWriter:
    """Writes blocks of a row array in any order, from any number of threads."""

    def __init__(self, writer: StoreWriter, array: RowArray) -> None:
        """Creates the files.  Raises OutOfSpace."""
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
        """Write a block: `slot` is uint8 (slot_bytes,), page-aligned.  Raises OutOfSpace."""
        g = self.geometry
        page_crcs(slot, g.pages_per_block, self._crcs[block * g.pages_per_block :])
        shard, offset = g.locate(block)
        write_exact(self._fds[shard], byte_view(slot), offset, self._names[shard])

    def __enter__(self) -> "BlocksWriter":
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        """Finish the array, unless there was an error.  Raises OutOfSpace."""
        while self._fds:
            os.close(self._fds.pop())
        if kind is None:
            self._writer.end_parts(self._array, self._crcs)


class _GroupRows:
    """Collects the rows of one group in order, a block at a time."""

    def __init__(
        self,
        rows: NDArray[np.int64],
        first_block: int,
        block: NDArray[np.uint8],
        row_bytes: int,
        out: BlocksWriter,
    ) -> None:
        """`rows`: those that the group wants, ascending."""
        self._rows, self._number, self._block = rows, first_block, block
        self._width, self._out, self._geometry = row_bytes, out, out.geometry
        self._done = self._filled = 0

    def take(self, piece: NDArray[np.uint8], first: int, source: BlockGeometry) -> None:
        """Copy wanted rows from a piece: uint8 (blocks, slot_bytes), blocks from `first` on.

        Raises OutOfSpace.
        """
        per, width = source.rows_per_block, self._width
        stop = self._done + int(
            np.searchsorted(self._rows[self._done :], (first + len(piece)) * per)
        )
        while self._done < stop:
            count = min(stop - self._done, self._geometry.rows_per_block - self._filled)
            blocks, within = np.divmod(self._rows[self._done : self._done + count], per)
            addresses = ((blocks - first) * source.slot_bytes + within * width).view(np.uint64)
            to = self._block[self._filled * width :]
            gather_rows(piece.reshape(-1), addresses, 0, count, width, to)
            self._done += count
            self._filled += count
            if self._filled == self._geometry.rows_per_block:
                self.flush()

    def flush(self) -> None:
        """Write the current block, padded with zeros.  Raises OutOfSpace."""
        if self._filled:
            self._block[self._filled * self._width :] = 0
            self._out.put(self._number, self._block)
            self._number, self._filled = self._number + 1, 0


class WantedRows(NamedTuple):
    """The rows that one group wants of an array, and where they go."""

    ids: ArrayFile  # store ids of all groups
    first: int  # position in `ids` of the group's first row
    num_rows: int  # number of its rows, whose ids ascend
    out: BlocksWriter
    block: int  # first block of the group in `out`

    @property
    def num_bytes(self) -> int:
        """Memory while the group is filled: a block, and ids as they are read and as int64."""
        id_bytes: int = 8 + self.ids.dtype.itemsize
        return self.out.geometry.slot_bytes + id_bytes * self.num_rows

    def rows(self, first_node: int) -> NDArray[np.int64]:
        """Row numbers in the array whose row 0 belongs to `first_node`."""
        return self.ids.read(self.first, self.num_rows).astype(np.int64) - first_node


def wanted_rows(
    ids: ArrayFile, groups: Iterable[tuple[int, ...]], number: int, out: BlocksWriter
) -> Iterator[WantedRows]:
    """The rows of type `number` in each group; each group begins with a new block of `out`.

    ids      store ids, group by group, and by type inside a group
    groups   number of rows of each type, for each group
    """
    at = block = 0
    for rows in groups:
        yield WantedRows(ids, at + sum(rows[:number]), rows[number], out, block)
        at += sum(rows)
        block += -(-rows[number] // out.geometry.rows_per_block)


def fill_groups(
    store: Store,
    array: RowArray,
    first_node: int,
    wanted: Sequence[WantedRows],
    pool: ThreadPoolExecutor,
    memory: PackMemory,
    stage: PassProgress,
) -> None:
    """Write the rows of all groups, in each pass as many groups as memory allows.

    array        the array of the store with these rows
    first_node   store id of its first row

    Raises CorruptBlock, OutOfSpace.
    """
    low = 0
    while low < len(wanted):
        high, room = low, memory.blocks
        while high < len(wanted) and (high == low or room >= wanted[high].num_bytes):
            room -= wanted[high].num_bytes
            high += 1
        slot = wanted[low].out.geometry.slot_bytes
        blocks = aligned_buffer((high - low) * slot).reshape(high - low, slot)
        groups = [
            _GroupRows(w.rows(first_node), w.block, block, array.row_bytes, w.out)
            for w, block in zip(wanted[low:high], blocks, strict=True)
        ]
        _pass_by(store, array, groups, pool, memory, stage if high == len(wanted) else None)
        low = high


def _pass_by(
    store: Store,
    array: RowArray,
    groups: Sequence[_GroupRows],
    pool: ThreadPoolExecutor,
    memory: PackMemory,
    stage: PassProgress | None,
) -> None:
    """Read the array in order, and copy its rows to all of these groups."""
    file, threads = store.rows(array), memory.settings.workers
    shares = [groups[i::threads] for i in range(threads)]

    def pieces() -> Iterator[tuple[NDArray[Any], ...]]:
        for block, piece in scan_blocks(file, memory.scan):
            yield np.array([block]), piece

    with closing(read_ahead(pieces())) as ahead:
        for number, piece in ahead:
            block = int(number[0])

            def take(share: Sequence[_GroupRows]) -> None:
                for group in share:
                    group.take(piece, block, file.geometry)  # noqa: B023  # ends before the next

            list(pool.map(take, shares))
            if stage is not None:
                stage.advance(len(piece) * file.geometry.rows_per_block)
    for group in groups:
        group.flush()
