"""An opened store: its manifest, where its blocks lie, and reading whole arrays in order."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock, StoreError
from blockstore.format import (
    PAGE_BYTES,
    ROOT,
    BlockGeometry,
    HaloColumns,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    blocked_arrays,
    bound_files,
    crc_path,
    graph_geometry,
    row_geometry,
    shard_path,
    side_arrays,
)
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.elsewhere import PageSource
from blockstore.io.files import OpenFiles, read_exact
from blockstore.kernels.crc import find_bad_page, page_crcs
from blockstore.part import Holes, StorePart, holes_of, read_part, without_hops
from blockstore.root import read_bound, read_root
from blockstore.stripes import Deal, StripeSet, check_files, read_stripes
from blockstore.validate import (
    GraphCheck,
    RowCheck,
    check_manifest,
    check_offsets,
    inside,
    row_checks,
)

INDEX_ENTRY_BYTES = 16  # of a shard's index: offset and length, uint64 each
_ABSENT = 2**64 - 1


class FileRange(NamedTuple):
    """Consecutive bytes of a file of an array."""

    path: Path
    offset: int
    num_bytes: int
    at: int  # byte of the array's slots, counted through all files, that they begin with


@dataclass(frozen=True, slots=True)
class BlockedFile:
    """One Zarr array of blocks: a row array, or the graph blocks of a relation."""

    path: str  # of the array inside the store
    geometry: BlockGeometry
    shards: tuple[Path, ...]  # or, if blocks are dealt over disks, a file on each
    crcs: NDArray[np.uint32]  # (num_blocks * pages_per_block,)
    check: GraphCheck | RowCheck | None = None  # of blocks that are read; None: any bytes do
    holes: Holes | None = None  # blocks that are not in this part of a store; None: all are here
    pages: PageSource | None = None  # source of pages that are holes; None: all are here
    deal: Deal | None = None  # how blocks are dealt; None: they are in shards

    def place(self, page: int) -> tuple[int, int]:
        """The file of a page, counted through all files, and which of its pages it is."""
        if self.deal is not None:
            return self.deal.place(page)
        return divmod(page, self.geometry.pages_per_shard)

    def where(self, block: int) -> str:
        """File and byte at which a block begins."""
        file, page = self.place(block * self.geometry.pages_per_block)
        return f"{self.shards[file]}+{page * PAGE_BYTES}"

    def check_blocks(self, block: int, data: NDArray[np.uint8]) -> None:
        """Check adjacent blocks whose pages are right, uint8.  Raises CorruptBlock: the file."""
        if self.check is None:
            return
        size = self.geometry.slot_bytes
        first = block * size
        for path, _, num_bytes, at in self.ranges(first, first + data.size):
            part = data[at - first : at - first + num_bytes]
            self.check.check(at // size, part, size, str(path))

    def ranges(self, first: int, stop: int) -> list[FileRange]:
        """File ranges of bytes [first, stop) of the slots, counted through all files, in order."""
        found = []
        unit = self.geometry.pages_per_shard if self.deal is None else self.deal.unit_pages
        while first < stop:
            page, inside = divmod(first, PAGE_BYTES)
            file, at = self.place(page)
            count = min(stop - first, (unit - page % unit) * PAGE_BYTES - inside)
            found.append(FileRange(self.shards[file], at * PAGE_BYTES + inside, count, first))
            first += count
        return found

    def row_ranges(self, row_bytes: int, first: int, stop: int) -> list[FileRange]:
        """File ranges of rows [first, stop), in order: nothing is between the rows.

        For an array without gaps, such as hops: rows of other arrays are not adjacent.
        Raises ValueError: there are gaps, or no such rows.
        """
        g = self.geometry
        if g.chunk_bytes != g.slot_bytes or g.rows_per_block * row_bytes != g.chunk_bytes:
            raise ValueError(f"{self.path}: rows have gaps between them, expected an array of hops")
        if not 0 <= first <= stop <= g.num_blocks * g.rows_per_block:
            raise ValueError(
                f"{self.path}: rows {first} to {stop}, expected 0 to "
                f"{g.num_blocks * g.rows_per_block}"
            )
        return self.ranges(first * row_bytes, stop * row_bytes)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds a store dtype: bfloat16 is held as uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


class Store:
    """A store on disk.  Holds no descriptor; every file that is opened through it is checked."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        part: StorePart | None = None,
        pages: PageSource | None = None,
        stripes: StripeSet | None = None,
    ) -> None:
        """`manifest`: has been checked.

        part      which part of a store it is; None: it is whole
        pages     source of pages of blocks that are not in its files; None: all are
        stripes   over which disks its blocks are dealt; None: they are in its folder
        """
        self.path, self.part, self.pages, self.stripes = path, part, pages, stripes
        self.manifest = manifest if part is None else without_hops(manifest)
        self._root = os.path.realpath(path)  # links may lead to a store, not out of it
        self._row_checks = row_checks(self.manifest)
        self._tables: dict[str, NDArray[np.uint64]] = {}  # of graphs, by path

    @property
    def where(self) -> str:
        """For people: its path, or its URL."""
        return str(self.path) if self.pages is None else self.pages.url

    def check_whole(self, what: str) -> None:
        """Raises StoreError: it is a part, and `what` is for whole stores."""
        if self.part is not None:
            raise StoreError(
                f"{self.path}: is the {self.part}; {what} expects a whole store; give it the store "
                "that this part was made of"
            )

    def rows(self, array: RowArray) -> BlockedFile:
        """The blocks of a row array.  Raises CorruptBlock."""
        geometry = row_geometry(array, self.manifest.block_bytes)
        return self.blocks(array.path, geometry, 1 + len(array.row_shape))

    def graph(self, relation: Relation | HaloColumns) -> BlockedFile:
        """The graph blocks of a relation, or of its copies.  Raises CorruptBlock."""
        geometry = graph_geometry(relation.num_blocks, self.manifest.block_bytes)
        return self.blocks(relation.path, geometry, 2)

    def blocks(self, path: str, geometry: BlockGeometry, ndim: int) -> BlockedFile:
        """An array of blocks, as `blocked_arrays` lists it.  Raises CorruptBlock."""
        check: GraphCheck | RowCheck | None = self._row_checks.get(path)
        for columns in self.manifest.graphs():
            if columns.path == path:
                check = self.graph_check(columns)
        crcs = self.side(crc_path(path), np.uint32, geometry.num_pages)
        deal = self._deal(path, geometry)
        shards = deal.files if deal else find_shards(self._root, path, geometry, ndim)
        holes = None if self.part is None else holes_of(self.part, path, geometry)
        return BlockedFile(path, geometry, shards, crcs, check, holes, self.pages, deal)

    def _deal(self, path: str, geometry: BlockGeometry) -> Deal | None:
        """How an array is dealt, whose files are there; None: it is not.  Raises CorruptBlock."""
        if self.stripes is None or path not in self.stripes.arrays:
            return None
        deal = self.stripes.deal(path, geometry)
        check_files(deal)
        return deal

    def graph_check(self, relation: Relation | HaloColumns) -> GraphCheck:
        """What the blocks of a relation, or of its copies, must say.  Raises CorruptBlock."""
        tables = self.first_node(relation), self.first_edge(relation)
        return GraphCheck(self.manifest, relation, *tables, self.path / relation.path)

    def first_node(self, relation: Relation | HaloColumns) -> NDArray[np.uint64]:
        """The object index of a relation: first column of each block, then the end.

        uint64 (num_blocks + 1,), ascending; not to be changed.  Raises CorruptBlock.
        """
        owner = next(r for r in self.manifest.relations if relation in (r, r.halo))
        dst = next(t for t in self.manifest.types if t.name == owner.dst)
        first, count = dst.first, dst.num_nodes
        if relation is owner.halo:
            assert dst.halo is not None
            first, count = 0, dst.halo.nodes.num_rows
        path, size = relation.first_node_path, relation.num_blocks + 1
        return self._table(path, size, first, first + count, "first nodes of blocks")

    def first_edge(self, relation: Relation | HaloColumns) -> NDArray[np.uint64]:
        """Edges of a relation before each block, then all, uint64 (num_blocks + 1,).

        Not to be changed.  Raises CorruptBlock.
        """
        path, size = relation.first_edge_path, relation.num_blocks + 1
        return self._table(path, size, 0, relation.num_edges, "edges before blocks")

    def partition_offsets(self, t: NodeType) -> NDArray[np.uint64]:
        """First store id of each partition of a type that has some, then the end of its range.

        uint64 (num_partitions + 1,), ascending.  Raises CorruptBlock.
        """
        path, stop = t.partition_offsets_path, t.first + t.num_nodes
        return self._table(path, t.num_partitions + 1, t.first, stop, "partitions")

    def halo_offsets(self, t: NodeType) -> NDArray[np.uint64]:
        """First slot of each group of a type that has a halo, then all.

        uint64 (num_partitions + 2,), ascending.  Raises CorruptBlock.
        """
        assert t.halo is not None
        path, slots = t.halo.offsets_path, t.halo.nodes.num_rows
        return self._table(path, t.num_partitions + 2, 0, slots, "groups of slots")

    def _table(self, path: str, size: int, first: int, stop: int, what: str) -> NDArray[np.uint64]:
        if path not in self._tables:
            offsets = self.side(path, np.uint64, size).copy()
            check_offsets(offsets, first, stop, what, self.path / path)
            self._tables[path] = offsets
        return self._tables[path]

    def scale(self, array: RowArray) -> NDArray[np.float32]:
        """Factors of the values of an int8 array, float32 (columns,), finite.

        Raises CorruptBlock.
        """
        scale: NDArray[np.float32] = self.side(array.scale_path, np.float32, array.row_items)
        if not np.isfinite(scale).all():
            raise CorruptBlock(
                f"{self.path / array.scale_path}: holds {scale[~np.isfinite(scale)][0]}, expected "
                "finite numbers; ingest again, or restore the file"
            )
        return scale

    def side(self, array_path: str, dtype: Any, size: int) -> NDArray[Any]:
        """A small array of one chunk, which the manifest binds.  Raises CorruptBlock."""
        if size == 0:
            return np.empty(0, dtype)
        expected = size * np.dtype(dtype).itemsize + 4
        raw = read_bound(self._root, self.manifest, f"{array_path}/c/0", expected)
        return np.frombuffer(raw, dtype, size)

    def check_files(self) -> None:
        """Check that every file is there and as it was written, except for pages of blocks.

        These are verified when they are read.  Raises CorruptBlock: the first fault.
        """
        manifest, expected = self.manifest, bound_files(self.manifest)
        odd = sorted(manifest.files.keys() ^ set(expected))
        if odd:
            found = "is bound, but of no array" if odd[0] in manifest.files else "is not bound"
            raise CorruptBlock(f"{self.path / ROOT}: {odd[0]} {found}: ingest again")
        for path, dtype, size in side_arrays(manifest):
            self.side(path, dtype, size)
        for name in expected:
            if name.endswith(ROOT):
                read_bound(self._root, manifest, name)
        for path, geometry, ndim in blocked_arrays(manifest):
            if self._deal(path, geometry) is None:
                find_shards(self._root, path, geometry, ndim)
        for columns in manifest.graphs():
            self.graph_check(columns)
        for t in manifest.types:
            if t.num_partitions:
                self.partition_offsets(t)
            if t.halo is not None:
                self.halo_offsets(t)


def open_store(path: Path) -> Store:
    """Open a store; all of it except the pages of its blocks is checked.

    Raises NotAStore, UnsupportedVersion, CorruptBlock; StoreError: a disk that it is dealt to is
    missing, or another one.
    """
    manifest = read_root(path)
    check_manifest(manifest, path / ROOT)
    arrays = frozenset(name for name, _, _ in blocked_arrays(manifest))
    part = read_part(os.path.realpath(path), manifest)
    store = Store(path, manifest, part, stripes=read_stripes(path, arrays))
    store.check_files()
    return store


def scan_blocks(
    file: BlockedFile,
    buffer_bytes: int = 4 << 20,
    start: int = 0,
    stop: int | None = None,
    lane: tuple[int, int] = (0, 1),
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Blocks [start, stop) of a file in order, checked: (first block, uint8 (count, slot_bytes)).

    lane   (i, n)   only parts i, i + n, i + 2 n, ... of those that come: n threads share the work

    Checksums are verified, and what the blocks say.  The array is reused by the next step.  Raises
    CorruptBlock; AbsentRows: one is not in this part of the store.
    """
    geometry = file.geometry
    size = geometry.slot_bytes
    batch = max(1, buffer_bytes // size)
    buffer = aligned_buffer(batch * size)
    stop = geometry.num_blocks if stop is None else stop
    number, block, per_shard = -1, start, geometry.blocks_per_shard
    with OpenFiles() as opened:
        while block < stop:
            count = min(batch, stop - block, per_shard - block % per_shard)
            number += 1
            if number % lane[1] == lane[0]:
                ranges = file.ranges(block * size, (block + count) * size)
                if file.holes is not None:
                    file.holes.check(block, block + count, file.where(block))
                data = buffer[: count * size]
                _read_pages(file, ranges, opened, data)
                file.check_blocks(block, data)
                yield block, data.reshape(count, size)
            block += count


def _read_pages(
    file: BlockedFile, ranges: list[FileRange], opened: OpenFiles, buffer: NDArray[np.uint8]
) -> None:
    """Fill whole pages, which lie in these ranges, one after the other.  Raises CorruptBlock."""
    first = ranges[0].at

    def read() -> None:
        for path, offset, num_bytes, at in ranges:
            data, page = buffer[at - first : at - first + num_bytes], at // PAGE_BYTES
            crcs = file.crcs[page : page + num_bytes // PAGE_BYTES]
            read_verified(opened.fd(path), data, offset, crcs, str(path))

    if file.pages is None:
        read()
        return
    page = first // PAGE_BYTES
    wanted = np.arange(page, page + buffer.size // PAGE_BYTES)
    with file.pages.hold(file.path, wanted, file.crcs, early=False):
        try:
            read()
        except CorruptBlock:  # a crash has torn a page, or the disk has changed it
            file.pages.bring_again(file.path, wanted, file.crcs)
            read()


def scan_rows(
    store: Store,
    array: RowArray,
    buffer_bytes: int = 4 << 20,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Rows in order, verified: (first row, rows of numpy dtype (count, *row_shape)).

    start, stop   only blocks that have some of these rows

    A piece is one block's rows, valid until the next step.  Raises CorruptBlock, AbsentRows.
    """
    file = store.rows(array)
    geometry = file.geometry
    low = start // geometry.rows_per_block
    high = None if stop is None else -(-stop // geometry.rows_per_block)
    for first, blocks in scan_blocks(file, buffer_bytes, low, high):
        for i in range(blocks.shape[0]):
            row = (first + i) * geometry.rows_per_block
            count = min(geometry.rows_per_block, array.num_rows - row)
            raw = blocks[i, : count * array.row_bytes]
            yield row, raw.view(numpy_dtype(array.dtype)).reshape(count, *array.row_shape)


def read_rows(store: Store, array: RowArray) -> NDArray[Any]:
    """All rows as one array in memory.  Raises CorruptBlock, AbsentRows."""
    out = np.empty((array.num_rows, *array.row_shape), numpy_dtype(array.dtype))
    for first, rows in scan_rows(store, array):
        out[first : first + rows.shape[0]] = rows
    return out


def read_verified(
    fd: int, buffer: NDArray[np.uint8], offset: int, expected: NDArray[np.uint32], where: str
) -> None:
    """Fill whole pages from `offset` on; `expected`: their checksums.  Raises CorruptBlock."""
    read_exact(fd, [byte_view(buffer)], offset, where)
    bad = int(find_bad_page(buffer, expected.size, expected))
    if bad >= 0:
        raise corrupt_page(
            where, offset + bad * PAGE_BYTES, buffer[bad * PAGE_BYTES :], int(expected[bad])
        )


def corrupt_page(where: str, offset: int, page: NDArray[np.uint8], expected: int) -> CorruptBlock:
    found = np.empty(1, np.uint32)
    page_crcs(page[:PAGE_BYTES], 1, found)
    return CorruptBlock(
        f"{where}+{offset}: crc32c of the page is {int(found[0]):#010x}, expected "
        f"{expected:#010x}; the disk or a copy changed it: ingest again, or restore the file"
    )


def find_shards(root: str, array_path: str, geometry: BlockGeometry, ndim: int) -> tuple[Path, ...]:
    """Files of an array, each of its size and with its index.  Raises CorruptBlock.

    root   of the store, or of packed epochs, without links: `os.path.realpath`
    """
    shards = []
    for shard in range(geometry.num_shards):
        path = inside(root, shard_path(array_path, shard, ndim))
        _check_shard(path, geometry, geometry.blocks_in(shard))
        shards.append(path)
    return tuple(shards)


def _check_shard(path: Path, geometry: BlockGeometry, num_blocks: int) -> None:
    """A shard has its size, and its index says that block i lies at i * slot_bytes."""
    data_bytes = num_blocks * geometry.slot_bytes
    index_bytes = geometry.blocks_per_shard * INDEX_ENTRY_BYTES
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            f.seek(data_bytes)
            raw = f.read(index_bytes + 4)
    except OSError as error:
        raise CorruptBlock(f"{path}: {error.strerror}, expected a shard of blocks") from error
    if size != data_bytes + index_bytes + 4:
        raise CorruptBlock(
            f"{path}: {size} bytes, expected {data_bytes + index_bytes + 4}; it was truncated or "
            "replaced: ingest again, or restore it from a copy"
        )
    if raw != shard_index(geometry, num_blocks):
        raise CorruptBlock(
            f"{path}+{data_bytes}: another shard index than that of {num_blocks} blocks of "
            f"{geometry.chunk_bytes} bytes; restore it from a copy, or ingest again"
        )


def shard_index(geometry: BlockGeometry, num_blocks: int) -> bytes:
    """What follows the blocks of a shard that holds its first `num_blocks`: index and crc32c."""
    index = np.full((geometry.blocks_per_shard, 2), _ABSENT, "<u8")
    index[:num_blocks, 0] = np.arange(num_blocks, dtype=np.uint64) * np.uint64(geometry.slot_bytes)
    index[:num_blocks, 1] = geometry.chunk_bytes
    raw = index.tobytes()
    return raw + crc_bytes(raw)


def crc_bytes(raw: bytes) -> bytes:
    """The crc32c that Zarr's codec appends to bytes."""
    return int(google_crc32c.value(raw)).to_bytes(4, "little")
