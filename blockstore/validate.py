"""Validates what a store says: everything that is used as a size, an index or a path.

Checksums tell that bytes are those that were written, not that whoever wrote them meant well.  A
manifest is checked when the store is opened, tables when they are read, graph blocks after each
read from disk: kernels use the numbers as they are.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import (
    BLOCK_HEADER,
    ITEM_BYTES,
    PAGE_BYTES,
    SHARD_BYTES,
    BlockHeader,
    EdgeLayout,
    Halo,
    HaloColumns,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    columns_of,
    edge_layout,
    edges_start_bytes,
    row_geometry,
    side_arrays,
)
from blockstore.kernels.check import (
    BAD_CARRIED,
    BAD_LAST_DEGREE,
    BAD_OFFSETS,
    FIELDS,
    GOOD,
    Expected,
    check_head,
    check_pages,
    check_sources,
    find_bad_block,
)
from blockstore.kernels.packed import PackedIds, unpack_ids

_MAX_DIMENSIONS = 32
_IDS = ("uint32", "uint64")


class _Fault(Exception):
    """What is wrong, without the place."""


def _expect(sound: bool, what: str, found: object, expected: object) -> None:
    if not sound:
        text = f"{found!r}"
        raise _Fault(f"{what} is {text[:80]}{'...' * (len(text) > 80)}, expected {expected}")


def check_manifest(manifest: Manifest, where: Path) -> None:
    """Check every number, name, dtype and path, alone and against the others.  Nothing is read.

    where   of the manifest; opens the message

    Raises CorruptBlock.
    """
    try:
        _check_manifest(manifest)
    except _Fault as fault:
        raise CorruptBlock(f"{where}: {fault}; ingest again, or restore the file") from None
    except CorruptBlock as error:  # names an array, no file
        raise CorruptBlock(f"{where}: {error}") from None


def _check_manifest(manifest: Manifest) -> None:
    block = manifest.block_bytes
    _expect(
        PAGE_BYTES <= block <= SHARD_BYTES and block % PAGE_BYTES == 0, "block_bytes", block,
        f"a multiple of {PAGE_BYTES} up to {SHARD_BYTES}",
    )  # fmt: skip
    _expect(manifest.id_dtype in _IDS, "id_dtype", manifest.id_dtype, " or ".join(_IDS))
    _expect(bool(manifest.types), "types", (), "at least one")
    _check_types(manifest)
    _check_relations(manifest)
    for array in manifest.row_arrays():
        _check_array(array, block)
    paths = [array.path for array in manifest.row_arrays()]
    paths += [columns.path for columns in manifest.graphs()]
    for path in (*paths, *(path for path, _, _ in side_arrays(manifest))):
        check_path(path)
    _expect(len(set(paths)) == len(paths), "paths of arrays", paths, "paths that differ")
    for t in manifest.types:
        _check_type(manifest, t)
    for relation in manifest.relations:
        _check_relation(manifest, relation)
    for rows in _described(manifest):
        rows.check()


def _check_types(manifest: Manifest) -> None:
    """Ranges of store ids follow each other."""
    first = 0
    for t in manifest.types:
        _expect(t.first == first, f"first of {t.name!r}", t.first, first)
        first += t.num_nodes
    names = [t.name for t in manifest.types]
    _expect(len(set(names)) == len(names), "types", names, "names that differ")
    maximum = 1 << 8 * min(ITEM_BYTES[manifest.id_dtype], 7)
    _expect(first <= maximum, f"nodes of id_dtype {manifest.id_dtype}", first, f"at most {maximum}")


def _check_relations(manifest: Manifest) -> None:
    """Ends that are there, names that differ."""
    names = {t.name for t in manifest.types}
    triples = [(r.src, r.name, r.dst) for r in manifest.relations]
    for src, name, dst in triples:
        _expect({src, dst} <= names, f"ends of relation {name!r}", (src, dst), "types of the store")
    _expect(len(set(triples)) == len(triples), "relations", triples, "names that differ")


def _check_array(array: RowArray, block_bytes: int) -> None:
    what = f"{array.path[:200]!r}"
    _expect(array.dtype in ITEM_BYTES, f"dtype of {what}", array.dtype, "a dtype of rows")
    shape = array.row_shape
    _expect(
        len(shape) <= _MAX_DIMENSIONS and all(0 < n <= SHARD_BYTES for n in shape),
        f"row_shape of {what}", shape, "positive numbers",
    )  # fmt: skip
    _expect(
        array.row_bytes <= SHARD_BYTES, f"row_shape of {what}", shape, f"{SHARD_BYTES} bytes a row"
    )
    _expect(
        0 <= array.rows_per_block * array.row_bytes <= SHARD_BYTES + array.row_bytes * PAGE_BYTES,
        f"rows_per_block of {what}", array.rows_per_block, "0, or rows that fill a block",
    )  # fmt: skip
    row_geometry(array, block_bytes)  # whole pages
    _expect(
        not array.scale_path or array.dtype == "int8",
        f"dtype of {what}, which has a scale", array.dtype, "int8",
    )  # fmt: skip


def check_path(path: str) -> None:
    """Check that a path stays inside the store, links aside.  Raises CorruptBlock."""
    if "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise CorruptBlock(
            f"path {path[:80]!r}: expected one relative to the store, without '.' and '..'"
        )


class _Rows(NamedTuple):
    """What an array of rows must be."""

    what: str
    array: RowArray
    num_rows: int
    dtypes: Collection[str] = ITEM_BYTES
    shape: tuple[int, ...] | None = None  # None: any
    ids: tuple[int, ...] = ()  # least value, then the exclusive bound of each column

    def check(self) -> None:
        what, array = self.what, self.array
        _expect(
            array.num_rows == self.num_rows, f"num_rows of {what}", array.num_rows, self.num_rows
        )
        _expect(
            array.dtype in self.dtypes, f"dtype of {what}", array.dtype, " or ".join(self.dtypes)
        )
        if self.shape is not None:
            _expect(
                array.row_shape == self.shape, f"row_shape of {what}", array.row_shape, self.shape
            )


def _described(manifest: Manifest) -> Iterator[_Rows]:
    """All arrays of rows; arrays of ids are used as an index."""
    ids, sizes = (manifest.id_dtype,), {t.name: t.num_nodes for t in manifest.types}
    for t in manifest.types:
        of, num, stored = f"of {t.name!r}", t.num_nodes, (t.first, t.first + t.num_nodes)
        yield _Rows(f"original_id {of}", t.original_id, num, ids, (), (0, num))
        yield _Rows(f"store_id {of}", t.store_id, num, ids, (), stored)
        if t.label is not None:
            yield _Rows(f"label {of}", t.label, num)
        for name, array in t.features.items():
            yield _Rows(f"feature {name!r} {of}", array, num)
        for name, array in t.splits.items():
            yield _Rows(f"split {name!r} {of}", array, array.num_rows, ("int64",), (), (0, num))
        if t.hubs is not None:
            yield _Rows(f"hubs {of}", t.hubs, t.hubs.num_rows, ids, (), stored)
        if t.halo is not None:
            slots = t.halo.nodes.num_rows
            yield _Rows(f"halo {of}", t.halo.nodes, slots, ids, (), stored)
            for array, copy in copied_arrays(t, t.halo):
                what = f"{copy.path!r}, a copy of {array.path!r}"
                yield _Rows(what, copy, slots, (array.dtype,), array.row_shape)
        for split, hops in t.hops.items():
            rows = hops.nodes.num_rows
            yield from (_Rows(f"{array.path!r}", array, rows) for array in hops.arrays())
            yield _Rows(f"hops {split!r} {of}", hops.nodes, rows, ("int64",), (), (0, num))
    for r in manifest.relations:
        of = f"of relation {r.name!r}"
        for name, array in r.features.items():
            yield _Rows(f"feature {name!r} {of}", array, r.num_edges)
        for name, array in r.splits.items():
            pairs = bool(array.row_shape)
            below = (sizes[r.src], sizes[r.dst]) if pairs else (r.num_source_edges,)
            shape = (2,) if pairs else ()
            what = f"split {name!r} {of}"
            yield _Rows(what, array, array.num_rows, ("int64",), shape, (0, *below))


def copied_arrays(t: NodeType, halo: Halo) -> list[tuple[RowArray, RowArray]]:
    """Arrays of a type of which its halo has copies: (array, copy)."""
    pairs = [(t.features[name], copy) for name, copy in halo.features.items()]
    if t.label is not None and halo.label is not None:
        pairs.append((t.label, halo.label))
    return pairs


def _check_type(manifest: Manifest, t: NodeType) -> None:
    """Partitions, hubs, halos and hops; of arrays see `_described`."""
    of = f"of {t.name!r}"
    parts = max(other.num_partitions for other in manifest.types)
    what = f"num_partitions {of}"
    _expect(t.num_partitions in (0, parts), what, t.num_partitions, f"0, or {parts} as of others")
    _expect(
        bool(t.partition_offsets_path) == bool(t.num_partitions),
        f"partition_offsets_path {of}", t.partition_offsets_path, "one, if there are partitions",
    )  # fmt: skip
    if t.hubs is not None:
        maximum = t.num_nodes
        _expect(t.hubs.num_rows <= maximum, f"num_rows of hubs {of}", t.hubs.num_rows, maximum)
    if t.halo is not None:
        _expect(t.num_partitions > 0, f"{what}, which has a halo", 0, "some")
        names = sorted(t.halo.features), sorted(t.features)
        _expect(names[0] == names[1], f"features of the halo {of}", *names)
        labels = t.halo.label is not None, t.label is not None
        _expect(labels[0] == labels[1], f"whether the halo {of} has labels", *labels)
    for split, hops in t.hops.items():
        what, num = f"hops {split!r} {of}", hops.nodes.num_rows
        _expect(hops.split == split, f"split of {what}", hops.split, split)
        _expect(num <= t.num_nodes, f"num_rows of {what}", num, f"at most {t.num_nodes}")
        _expect(
            bool(hops.operators) and all(hops.operators.values()),
            f"operators of {what}", list(hops.operators), "some, each with hop 0 at least",
        )  # fmt: skip
        first = next(iter(hops.operators.values()))[0]
        for name, chain in hops.operators.items():
            _expect(chain[0] == first, f"hop 0 of {name!r}", chain[0].path, first.path)
        for array in hops.arrays():
            count = array.rows_per_block
            _expect(count > 0, f"rows_per_block of {array.path!r}", count, "an array without gaps")


def _check_relation(manifest: Manifest, relation: Relation) -> None:
    what = f"relation {relation.name!r}"
    dst = next(t for t in manifest.types if t.name == relation.dst)
    _expect(
        relation.edge_id_dtype in (None, *_IDS),
        f"edge_id_dtype of {what}", relation.edge_id_dtype, f"none, {' or '.join(_IDS)}",
    )  # fmt: skip
    copies = relation.halo is not None, dst.halo is not None
    _expect(copies[0] == copies[1], f"whether {what} has a halo, as {dst.name!r} does", *copies)
    capacity = edge_layout(manifest, relation).capacity(manifest.block_bytes)
    for columns in columns_of(relation):
        maximum = columns.num_blocks * capacity
        _expect(columns.num_edges <= maximum, f"num_edges of {what}", columns.num_edges, maximum)


def row_checks(manifest: Manifest) -> dict[str, "RowCheck"]:
    """Checks of all arrays of ids, by path."""
    return {
        rows.array.path: RowCheck(
            rows.array, row_geometry(rows.array, manifest.block_bytes).rows_per_block,
            rows.ids[0], np.array(rows.ids[1:], np.int64),
        )
        for rows in _described(manifest)
        if rows.ids
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Ids in the blocks of a row array: what their columns may hold."""

    array: RowArray
    rows_per_block: int
    first: int  # least value
    stop: NDArray[np.int64]  # exclusive bound of each column's values

    def check(self, block: int, data: NDArray[np.uint8], size: int, where: str) -> None:
        """Check adjacent blocks of `size` bytes as they were read, uint8.  Raises CorruptBlock."""
        for i in range(data.size // size):
            self._check_rows(block + i, data[i * size : (i + 1) * size], where)

    def _check_rows(self, block: int, data: NDArray[np.uint8], where: str) -> None:
        row = block * self.rows_per_block
        count = min(self.rows_per_block, self.array.num_rows - row)
        raw = data[: count * self.array.row_bytes]
        rows = raw.view(self.array.dtype).reshape(count, self.array.row_items)
        if int(rows.min()) >= self.first and (rows.max(axis=0) < self.stop).all():
            return
        bad = int(np.flatnonzero(((rows < self.first) | (rows >= self.stop)).any(axis=1))[0])
        raise CorruptBlock(
            f"{where}: row {row + bad} is {rows[bad].tolist()}, expected ids from {self.first} to "
            f"{(self.stop - 1).tolist()}; ingest again, or restore the file"
        )


def check_offsets(
    offsets: NDArray[np.uint64], first: int, stop: int, what: str, where: Path
) -> NDArray[np.uint64]:
    """Check that offsets ascend from `first` to `stop`; returns them.  Raises CorruptBlock."""
    sound = int(offsets[0]) == first and int(offsets[-1]) == stop
    if not sound or (offsets[1:] < offsets[:-1]).any():
        raise CorruptBlock(
            f"{where}: {what} from {offsets[0]} to {offsets[-1]}, expected ascending ones from "
            f"{first} to {stop}; ingest again, or restore the file"
        )
    return offsets


def inside(root: str, path: str) -> Path:
    """The file of this path in a store.  Raises CorruptBlock: links lead out of the store.

    root   of the store, without links: `os.path.realpath`
    """
    file = f"{root}/{path}"
    real = os.path.realpath(file)
    if not real.startswith(f"{root}/"):
        raise CorruptBlock(f"{file}: leads to {real}, expected a file inside of the store")
    return Path(file)


class GraphCheck:
    """What the blocks of one relation, or of its copies, must say."""

    def __init__(
        self,
        manifest: Manifest,
        columns: Relation | HaloColumns,
        first_node: NDArray[np.uint64],
        first_edge: NDArray[np.uint64],
        where: Path,
    ) -> None:
        """Raises CorruptBlock: no blocks can be as these tables say."""
        relation = next(r for r in manifest.relations if columns in (r, r.halo))
        src = next(t for t in manifest.types if t.name == relation.src)
        layout = edge_layout(manifest, relation)
        _check_room(first_node, first_edge, layout, manifest.block_bytes, where)
        self.expected = Expected(
            first_node, first_edge, layout.flags, layout.capacity(manifest.block_bytes),
            layout.source_bits, layout.source_base, src.num_nodes,
        )  # fmt: skip

    def find_bad_page(
        self, block: int, data: NDArray[np.uint8], expected: NDArray[np.uint32], where: str
    ) -> int:
        """The first page of a block, uint8 (block_bytes,), whose checksum is wrong, or -1.

        If all are right, the block's contents are checked, too.  Sources are checked while their
        page is in the cache: a pass of its own over blocks of 1 MiB takes as long as the checksums.
        Raises CorruptBlock.
        """
        bad, sound = check_pages(data, expected, block, self.expected)
        if bad < 0:
            self.check_head(block, data, where)
            if not sound:
                self.check_part(block, data, 0, data.size, where)
        return int(bad)

    def check(self, block: int, data: NDArray[np.uint8], size: int, where: str) -> None:
        """Check adjacent blocks of `size` bytes whose pages are right, uint8.

        One call for all of them: small blocks take less time than a call does.  Raises
        CorruptBlock.
        """
        bad = int(find_bad_block(data, size, block, self.expected))
        if bad >= 0:
            part = data[bad * size : (bad + 1) * size]
            self.check_head(block + bad, part, where)
            self.check_part(block + bad, part, 0, size, where)

    def check_head(self, block: int, data: NDArray[np.uint8], where: str) -> None:
        """Check header and offsets of a block, uint8: these, or more.  Raises CorruptBlock."""
        bad = int(check_head(data.view(np.uint32), block, self.expected))
        if bad != GOOD:
            self._say(bad, block, data, where)

    def check_part(
        self, block: int, data: NDArray[np.uint8], low: int, high: int, where: str
    ) -> None:
        """Check the sources that lie wholly in bytes [low, high) of a block, uint8 (block_bytes,),
        whose head is good.  Raises CorruptBlock."""
        expected, bits = self.expected, self.expected.source_bits
        nodes, edges = (
            int(table[block + 1] - table[block])
            for table in (expected.first_node, expected.first_edge)
        )
        start = edges_start_bytes(nodes)
        first = max(0, -(-8 * (low - start) // bits))
        stop = min(edges, 8 * (high - start) // bits)
        if not check_sources(data, start, first, stop, expected):
            found = np.empty(stop - first, np.uint64)
            ids = PackedIds(data, bits, np.uint64(expected.source_base))
            unpack_ids(ids, 8 * start + first * bits, found)
            end = np.uint64(expected.source_base + expected.num_sources)
            edge = int(np.flatnonzero(found >= end)[0])
            raise CorruptBlock(
                f"{where}, block {block}, edge {first + edge}: source {found[edge]}, expected "
                f"{expected.source_base} to {end - np.uint64(1)}; ingest again, or restore the file"
            )

    def _say(self, bad: int, block: int, data: NDArray[np.uint8], where: str) -> None:
        """Raises CorruptBlock: what `check_head` has found."""
        place = f"{where}, block {block}"
        header = BlockHeader.unpack(data[: BLOCK_HEADER.size].tobytes(), place)
        nodes, edges = (
            (int(table[block]), int(table[block + 1] - table[block]))
            for table in (self.expected.first_node, self.expected.first_edge)
        )
        said = {
            BAD_CARRIED: f"{header.num_carried} carried edges, which no earlier block begins",
            BAD_LAST_DEGREE: f"a last column of {header.last_degree} edges, which the blocks lack",
            BAD_OFFSETS: "offsets that do not ascend to the end",
        }.get(bad, f"{header} with another {FIELDS[min(bad, len(FIELDS) - 1)]}")
        raise CorruptBlock(
            f"{place}: {said}, expected flags {self.expected.flags}, columns from {nodes[0]} on, "
            f"{nodes[1]} of them, {edges[1]} edges, sources of {self.expected.source_bits} bits "
            f"from {self.expected.source_base} on; ingest again, or restore the file"
        )


def _check_room(
    first_node: NDArray[np.uint64],
    first_edge: NDArray[np.uint64],
    layout: EdgeLayout,
    block_bytes: int,
    where: Path,
) -> None:
    """Check that every block has room for its columns and edges.  Raises CorruptBlock."""
    maximum = np.uint64(8 * block_bytes)  # more of either would not fit, and sums could wrap
    nodes, edges = (
        np.minimum(np.diff(table), maximum).astype(np.int64) for table in (first_node, first_edge)
    )
    end = (BLOCK_HEADER.size + 4 + 4 * nodes + 7) // 8 * 8
    end += np.where(edges, (edges * layout.source_bits + 63) // 64 * 8 + 8, 0)
    for width in (layout.edge_id_bytes, layout.weight_bytes, layout.time_bytes):
        end += (edges * width + 7) // 8 * 8
    bad = np.flatnonzero(end > block_bytes)
    if bad.size:
        raise CorruptBlock(
            f"{where}: block {bad[0]} would have {nodes[bad[0]]} columns and {edges[bad[0]]} "
            f"edges, expected what {block_bytes} bytes hold; ingest again, or restore the file"
        )
