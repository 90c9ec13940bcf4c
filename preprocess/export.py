"""A store back into the plain layout, in bounded memory.

Features, labels and splits come out as they came in; bfloat16 as the float32 of the same value.
Edges come out in the source's order, without added reverses, where the store kept edge ids; else
all of them, by (target, source).
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace, StoreExists
from blockstore.format import Manifest, NodeType, Relation, RowArray
from blockstore.store import Store, numpy_dtype, read_rows, scan_blocks, scan_rows
from blockstore.units import format_bytes
from blockstore.unpack import unpack_block
from preprocess.errors import BadInput
from preprocess.ingest import work_folder
from preprocess.npy import NpyWriter
from preprocess.plan import row_disk_bytes, too_little_memory
from preprocess.progress import Progress
from preprocess.sources.plain_names import EDGES, FEATURES, LABEL
from preprocess.stages.csc import Records, Widths, sorted_columns
from preprocess.stages.edge_list import edges_by_id
from preprocess.stages.rows import place_rows

_NODE_BYTES = 16  # original id 4 or 8, count 4
_FIXED_BYTES = 8 << 20
_SCAN_BYTES = 4 << 20
_CSR_ITEMS = 1 << 18  # looked at together for numbers that are not zero


def export(store: Store, folder: Path, progress: Progress, mem_bytes: int = 1 << 30) -> None:
    """Write the folder.

    Raises BadInput, StoreExists, BudgetTooSmall, OutOfSpace, CorruptBlock; nothing is left behind
    then.
    """
    manifest = store.manifest
    if len(manifest.types) != 1 or len(manifest.relations) != 1:
        kinds = f"{len(manifest.types)} types, {len(manifest.relations)} relations"
        raise BadInput.at(store.path, kinds, "one each", "the plain layout holds no more")
    if folder.exists():
        raise StoreExists(f"{folder}: exists already; remove it, or choose another name")
    share = _plan_memory(manifest, mem_bytes)
    temporary = folder.absolute().with_name(f".{folder.name}.partial-{os.getpid()}")
    with work_folder(folder) as work:
        _check_disk(manifest, work)
        try:
            temporary.mkdir()
            _Export(store, temporary, work, share, progress).run()
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _plan_memory(manifest: Manifest, mem_bytes: int) -> int:
    """Bytes for chunks and buckets, tables aside.  Raises BudgetTooSmall."""
    block = manifest.block_bytes
    widest = max(a.row_bytes for a in manifest.row_arrays())
    tables = _NODE_BYTES * manifest.num_nodes + _FIXED_BYTES + 2 * max(_SCAN_BYTES, block, widest)
    least = tables + 16 * max(block, widest, 1 << 18)
    if mem_bytes < least:
        why = f"{manifest.num_nodes:,} nodes of {_NODE_BYTES} bytes each, and buffers"
        raise too_little_memory(mem_bytes, least, why)
    return mem_bytes - tables


def _check_disk(manifest: Manifest, work: Path) -> None:
    edges = sum(r.num_edges for r in manifest.relations)
    rows = [row_disk_bytes(a, manifest.block_bytes) for a in manifest.row_arrays()]
    need = 16 * edges + sum(rows) + max(20 * edges, *rows)
    free = shutil.disk_usage(work).free
    if need > free:
        raise OutOfSpace(
            f"{work.parent}: found {format_bytes(free)} free, expected {format_bytes(need)} for "
            "the folder and its making; free some space, or choose another disk"
        )


def columns_of(
    store: Store, relation: Relation
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None]]:
    """(targets, sources, edge ids) of each graph block, by store id."""
    file = store.graph(relation)
    last = -1  # the column that carried edges belong to
    for first, blocks in scan_blocks(file, _SCAN_BYTES):
        for i in range(blocks.shape[0]):
            block = unpack_block(blocks[i], f"{store.path / relation.path}, block {first + i}")
            header = block.header
            here = np.arange(header.first_node, header.first_node + header.num_nodes)
            carried = np.full(header.num_carried, last)
            last = int(here[-1]) if header.num_nodes else last
            targets = np.concatenate([carried, np.repeat(here, block.degrees_here())])
            yield targets, block.sources, block.edge_ids


class _Export:
    """One run."""

    def __init__(
        self, store: Store, folder: Path, work: Path, share: int, progress: Progress
    ) -> None:
        self._store, self._folder, self._work = store, folder, work
        self._share, self._progress = share, progress
        self._type: NodeType = store.manifest.types[0]
        self._relation: Relation = store.manifest.relations[0]
        self._original = read_rows(store, self._type.original_id)

    def run(self) -> None:
        """Every file of the folder."""
        if self._relation.edge_id_dtype is None:
            self._write_sorted_edges()
        else:
            self._write_edges_by_id()
        for name, array in self._type.features.items():
            stem = FEATURES if name == "x" else f"{FEATURES}_{name}"
            if array.source == "csr":
                self._write_csr(stem, array)
            else:
                self._write_dense(stem, array)
        if self._type.label is not None:
            self._write_dense(LABEL, self._type.label)
        for name, array in self._type.splits.items():
            with NpyWriter(self._folder / f"{name}_idx.npy", (array.num_rows,), np.int64) as out:
                for _, ids in scan_rows(self._store, array, _SCAN_BYTES):
                    out.append(ids)

    def _edges(self) -> Iterator[Records]:
        """Edges of each graph block, by original id."""
        none = np.empty(0, np.int64)
        for targets, sources, edge_ids in columns_of(self._store, self._relation):
            dst = self._original[targets].astype(np.int64)
            src = self._original[sources].astype(np.int64)
            yield Records(dst, src, none if edge_ids is None else edge_ids.astype(np.int64))

    def _write_sorted_edges(self) -> None:
        """Edges of a store without edge ids, by (target, source): two reads of the graph."""
        num_edges, num_nodes = self._relation.num_edges, self._original.size
        counts = np.zeros(num_nodes, np.uint32)
        with self._progress.stage("count edges", num_edges, "edges") as stage:
            for records in self._edges():
                np.add.at(counts, records.dst, np.uint32(1))
                stage.advance(records.dst.size)
        widths = Widths.of(self._store.manifest.id_dtype, num_nodes, None, num_edges)
        done = 0
        with NpyWriter(self._folder / f"{EDGES}.npy", (2, num_edges), np.int64) as out:
            for columns in sorted_columns(
                self._edges(), counts, widths, False, self._share, self._work, self._progress
            ):
                last = columns.first + columns.degrees.size
                out.put(done, columns.sources)
                dst = np.repeat(np.arange(columns.first, last), columns.degrees)
                out.put(num_edges + done, dst)
                done += columns.sources.size

    def _write_edges_by_id(self) -> None:
        """Edges of a store with edge ids, in the source's order, without what ingest dropped."""
        relation = self._relation
        kept = edges_by_id(
            self._edges(), relation.num_source_edges,
            relation.num_edges, self._original.dtype, self._share, self._work, self._progress,
        )  # fmt: skip
        count, pieces = kept
        done = 0
        with NpyWriter(self._folder / f"{EDGES}.npy", (2, count), np.int64) as out:
            for row, values in pieces:
                out.put(row * count + done, values)
                done += values.size if row == 1 else 0
        assert done == count

    def _placed(self, array: RowArray, emit: Any) -> None:
        """Rows of an array in the source's order, to `emit`."""
        pieces = (rows for _, rows in scan_rows(self._store, array, _SCAN_BYTES))

        def widened(rows: NDArray[Any]) -> None:
            wide = rows.astype(np.uint32) << np.uint32(16)
            emit(wide.view(np.float32))

        place_rows(
            pieces, array, self._original, self._share, self._work,
            widened if array.dtype == "bfloat16" else emit, self._progress,
        )  # fmt: skip

    def _write_dense(self, stem: str, array: RowArray) -> None:
        shape = (array.num_rows, *array.row_shape)
        with NpyWriter(self._folder / f"{stem}.npy", shape, _npy_dtype(array)) as out:
            self._placed(array, out.append)

    def _write_csr(self, stem: str, array: RowArray) -> None:
        """Dense rows as the CSR matrix that they came from; zeros are not kept."""
        path, width = self._folder, array.row_shape[0]
        step = max(1, _CSR_ITEMS // width)
        nnz = 0
        with (
            NpyWriter(path / f"{stem}_indptr.npy", (array.num_rows + 1,), np.int64) as indptr,
            NpyWriter(path / f"{stem}_indices.npy", None, np.int32) as indices,
            NpyWriter(path / f"{stem}_data.npy", None, _npy_dtype(array)) as data,
        ):
            indptr.append(np.zeros(1, np.int64))

            def emit(rows: NDArray[Any]) -> None:
                nonlocal nnz
                for first in range(0, rows.shape[0], step):
                    part = rows[first : first + step]
                    row, column = np.nonzero(part)
                    ends = nnz + np.cumsum(np.bincount(row, minlength=part.shape[0]))
                    indptr.append(ends)
                    indices.append(column.astype(np.int32))
                    data.append(part[row, column])
                    nnz += row.size

            self._placed(array, emit)
        meta = {"shape": [array.num_rows, width], "nnz": nnz}
        (path / f"{stem}_csr.json").write_bytes(msgspec.json.encode(meta))


def _npy_dtype(array: RowArray) -> np.dtype[Any]:
    return np.dtype(np.float32) if array.dtype == "bfloat16" else numpy_dtype(array.dtype)
