"""A store back into the plain layout.

Features, labels and splits come out as they came in.  Edges come out in the source's order,
without added reverses, where the store kept edge ids; else all of them, by (target, source).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreExists
from blockstore.format import NodeType, Relation, RowArray
from blockstore.store import Store, numpy_dtype, read_rows, scan_blocks, scan_rows
from blockstore.unpack import unpack_block
from preprocess.errors import BadInput
from preprocess.npy import NpyWriter
from preprocess.progress import Progress


def export(store: Store, folder: Path, progress: Progress) -> None:
    """Write the folder.  Raises StoreExists, CorruptBlock; nothing is left behind then.

    Memory: 8 bytes a node and 16 bytes an edge, or one array of rows, whichever is more.
    """
    manifest = store.manifest
    if len(manifest.types) != 1 or len(manifest.relations) != 1:
        raise BadInput(f"{store.path}: several types or relations, the plain layout has one each")
    if folder.exists():
        raise StoreExists(f"{folder}: exists already; remove it, or choose another name")
    node_type = manifest.types[0]
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        original = read_rows(store, node_type.original_id).astype(np.int64)
        _export_edges(store, manifest.relations[0], original, temporary, progress)
        for array in node_type.features.values():
            _export_features(store, array, original, temporary, progress)
        if node_type.label is not None:
            _export_rows(store, node_type.label, original, temporary / "node_label.npy", progress)
        _export_splits(store, node_type, temporary)
        temporary.rename(folder)
    finally:
        if temporary.exists():
            for path in temporary.iterdir():
                path.unlink()
            temporary.rmdir()


def columns_of(
    store: Store, relation: Relation
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None]]:
    """(targets, sources, edge ids) of each graph block, by store id."""
    file = store.graph(relation)
    last = -1  # the column that carried edges belong to
    for first, blocks in scan_blocks(file):
        for i in range(blocks.shape[0]):
            block = unpack_block(blocks[i], f"{store.path / relation.path}, block {first + i}")
            header = block.header
            here = np.arange(header.first_node, header.first_node + header.num_nodes)
            targets = np.concatenate(
                [np.full(header.num_carried, last), np.repeat(here, block.degrees_here())]
            )
            if header.num_nodes:
                last = int(here[-1])
            yield targets, block.sources, block.edge_ids


def _export_edges(
    store: Store,
    relation: Relation,
    original: NDArray[np.int64],
    folder: Path,
    progress: Progress,
) -> None:
    kept = relation.edge_id_dtype is not None
    count = relation.num_source_edges if kept else relation.num_edges
    edges = np.full((2, count), -1, np.int64)
    done = 0
    with progress.stage("edges", relation.num_edges, "edges") as stage:
        for targets, sources, edge_ids in columns_of(store, relation):
            where: Any = slice(done, done + sources.size)
            mask: Any = slice(None)
            if edge_ids is not None:
                mask = edge_ids < count
                where = edge_ids[mask].astype(np.int64)
            edges[0, where] = original[sources[mask]]
            edges[1, where] = original[targets[mask]]
            done += sources.size
            stage.advance(sources.size)
    # by id, edges that ingest dropped have left a hole; without ids there is an order to choose
    edges = edges[:, edges[0] >= 0] if kept else edges[:, np.lexsort((edges[0], edges[1]))]
    with NpyWriter(folder / "edge_index.npy", edges.shape, np.int64) as out:
        out.append(edges)


def _export_rows(
    store: Store, array: RowArray, original: NDArray[np.int64], path: Path, progress: Progress
) -> None:
    """Rows in the source's order, through memory a window of places at a time."""
    dtype = numpy_dtype(array.dtype)
    shape = (array.num_rows, *array.row_shape)
    window = max(1, (256 << 20) // array.row_bytes)
    total = array.num_rows * array.row_bytes
    with NpyWriter(path, shape, dtype) as out, progress.stage(path.name, total, "B") as stage:
        for low in range(0, array.num_rows, window):
            dense = np.empty((min(window, array.num_rows - low), *array.row_shape), dtype)
            for first, rows in scan_rows(store, array):
                places = original[first : first + rows.shape[0]] - low
                inside = (places >= 0) & (places < dense.shape[0])
                dense[places[inside]] = rows[inside]
            out.append(dense)
            stage.advance(dense.nbytes)


def _export_features(
    store: Store, array: RowArray, original: NDArray[np.int64], folder: Path, progress: Progress
) -> None:
    dense = folder / "node_feat.npy"
    _export_rows(store, array, original, dense, progress)
    if array.source != "csr":
        return
    rows = np.load(dense, mmap_mode="r")
    indptr = np.zeros(array.num_rows + 1, np.int64)
    for first in range(0, array.num_rows, 4096):
        part = rows[first : first + 4096]
        indptr[first + 1 : first + 1 + part.shape[0]] = (part != 0).sum(axis=1)
    np.cumsum(indptr, out=indptr)
    nnz = int(indptr[-1])
    with (
        NpyWriter(folder / "node_feat_indices.npy", (nnz,), np.int32) as indices,
        NpyWriter(folder / "node_feat_data.npy", (nnz,), rows.dtype) as data,
    ):
        for first in range(0, array.num_rows, 4096):
            part = rows[first : first + 4096]
            where = np.nonzero(part)
            indices.append(where[1].astype(np.int32))
            data.append(part[where])
    np.save(folder / "node_feat_indptr.npy", indptr)
    meta = {"shape": [array.num_rows, array.row_shape[0]], "nnz": nnz}
    (folder / "node_feat_csr.json").write_bytes(msgspec.json.encode(meta))
    dense.unlink()


def _export_splits(store: Store, node_type: NodeType, folder: Path) -> None:
    for name, array in node_type.splits.items():
        np.save(folder / f"{name}_idx.npy", read_rows(store, array))
