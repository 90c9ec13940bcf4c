"""From a source to a store: the stages in order, within one budget, whole or absent."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall, OutOfSpace, StoreExists
from blockstore.format import (
    FORMAT_VERSION,
    ITEM_BYTES,
    MIN_BLOCK_BYTES,
    PAGE_BYTES,
    Manifest,
    NodeType,
    Relation,
    RowArray,
)
from blockstore.pack import GraphPacker
from blockstore.store import numpy_dtype
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from preprocess.errors import BadInput
from preprocess.options import IngestOptions
from preprocess.progress import Progress
from preprocess.source import Source, SourceRelation, SourceRows
from preprocess.stages.csc import Dtypes, count_edges, sorted_columns
from preprocess.stages.order import NODE_BYTES, ColumnFile, breadth_first
from preprocess.stages.rows import checked_rows, write_rows

_FIXED_BYTES = 8 << 20  # buffers that do not follow the size of the graph
_SPLIT_ROWS = 1 << 16


class NodeOrder(NamedTuple):
    """Where nodes go, uint32 or uint64 (num_nodes,) each; None: they stay."""

    order: NDArray[Any] | None  # source id of each store id
    rank: NDArray[Any] | None  # store id of each source id


def ingest(source: Source, target: Path, options: IngestOptions, progress: Progress) -> Manifest:
    """Write the store; returns its manifest.

    Raises BadInput, StoreExists, BudgetTooSmall, OutOfSpace; nothing is left behind then.
    """
    if target.exists():
        raise StoreExists(f"{target}: exists already; remove it, or choose another name")
    if options.block_bytes % PAGE_BYTES or options.block_bytes < MIN_BLOCK_BYTES:
        raise BadInput(
            f"--block-size {options.block_bytes}: expected a multiple of {PAGE_BYTES} bytes"
        )
    job = _Ingest(source, target, options, progress)
    job.check_budget()
    job.check_disk()
    return job.run()


class _Ingest:
    """One run over a source with one node type and one relation."""

    def __init__(
        self, source: Source, target: Path, options: IngestOptions, progress: Progress
    ) -> None:
        self._source, self._target, self._options = source, target, options
        self._progress = progress
        (self._type,) = source.num_nodes
        (self._relation,) = source.relations
        self._num_nodes = source.num_nodes[self._type]
        self._dtypes = self._choose_dtypes()
        self._node_bytes = NODE_BYTES if options.order == "bfs" else 8
        spare = options.mem_bytes - self._node_bytes * self._num_nodes - _FIXED_BYTES
        self._mem = spare * 3 // 4  # for buckets and dense rows; the rest is for buffers
        self._buffer = max(options.block_bytes, min(8 << 20, spare // 16))

    def _choose_dtypes(self) -> Dtypes:
        wide = self._num_nodes >= 2**32 - 1
        if wide and self._options.ids == "uint32":
            raise BadInput(f"--ids uint32: {self._num_nodes:,} nodes need uint64")
        if wide and self._options.order == "bfs":
            raise BadInput(f"--order bfs: {self._num_nodes:,} nodes, expected fewer than 2**32")
        node = "uint64" if wide or self._options.ids == "uint64" else "uint32"
        edges = 2 * self._relation.num_edges
        edge = ("uint32" if edges < 2**32 else "uint64") if self._options.edge_ids else ""
        return Dtypes(node, edge)

    def check_budget(self) -> None:
        """Raises BudgetTooSmall with the least that would do."""
        block = self._options.block_bytes
        rows = [*self._source.features(self._type), *self._labels()]
        widest = max([r.row_bytes for r in rows], default=0)
        least = self._node_bytes * self._num_nodes + _FIXED_BYTES + 16 * max(block, widest)
        if self._options.mem_bytes < least:
            raise BudgetTooSmall(
                f"--mem {format_bytes(self._options.mem_bytes)}: {self._num_nodes:,} nodes take "
                f"{self._node_bytes} B each and buffers {format_bytes(_FIXED_BYTES + 16 * block)}; "
                f"give at least --mem {-(-least // (1 << 20))}M"
            )

    def check_disk(self) -> None:
        """Raises OutOfSpace before anything is written, where the store cannot fit."""
        options = self._options
        edges = self._relation.num_edges * (2 if options.undirected else 1)
        width = ITEM_BYTES[self._dtypes.node]
        edge = width + (ITEM_BYTES[self._dtypes.edge] if self._dtypes.edge else 0)
        rows = sum(a.num_rows * a.row_bytes for _, a in self._row_arrays())
        final = edges * edge + self._num_nodes * (4 + 2 * width) + rows
        passing = max(edges * (width + edge), max([0, *self._bucketed()]))
        held = edges * 4 if options.order == "bfs" and 4 * edges > self._mem // 2 else 0
        need = final + max(passing, held)
        folder = self._target.absolute().parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if need > free:
            raise OutOfSpace(
                f"{folder}: {format_bytes(free)} free, the store takes {format_bytes(final)} and "
                f"its making {format_bytes(need - final)} more; free some space, or choose another "
                "disk"
            )

    def _bucketed(self) -> list[int]:
        if self._options.order == "source":
            return []
        sizes = [a.num_rows * (a.row_bytes + 8) for _, a in self._row_arrays()]
        return [s for s in sizes if s > self._mem // 2]

    def run(self) -> Manifest:
        """All stages."""
        options, target = self._options, self._target
        splits = self._source.splits(self._type)
        counts = count_edges(self._source, self._relation, options, self._progress)
        work = target.absolute().parent / f".{target.name}.work-{os.getpid()}"
        try:
            work.mkdir(parents=True)
            nodes = self._order(counts, work)
            with StoreWriter(
                target, block_bytes=options.block_bytes, buffer_bytes=self._buffer
            ) as writer:
                relation = self._write_graph(writer, counts, nodes, work)
                del counts
                node_type = self._write_nodes(writer, nodes, splits, work)
                return writer.commit(
                    Manifest(
                        format=FORMAT_VERSION,
                        block_bytes=options.block_bytes,
                        id_dtype=self._dtypes.node,
                        types=(node_type,),
                        relations=(relation,),
                        order=options.order,
                        undirected=options.undirected,
                        duplicates="drop" if options.drop_equal else "keep",
                        self_loops=options.self_loops,
                    )
                )
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _order(self, counts: NDArray[np.uint32], work: Path) -> NodeOrder:
        """The order of the nodes: a pass over the edges of its own where it follows the graph."""
        if self._options.order == "source":
            return NodeOrder(None, None)
        num_edges = int(counts.sum(dtype=np.int64))
        held = ColumnFile(work / "columns", self._num_nodes, num_edges, self._mem // 2)
        left = self._mem // 2
        try:
            plain = Dtypes("uint32", "")
            for columns in sorted_columns(
                self._source, self._relation, counts, None, self._options, plain, left, work,
                self._progress,
            ):  # fmt: skip
                held.append(columns)
            held.finish()
            order, rank = breadth_first(held, self._progress)
        finally:
            held.close()
        dtype = np.dtype(self._dtypes.node)
        return NodeOrder(order.astype(dtype, copy=False), rank.astype(dtype, copy=False))

    def _write_graph(
        self, writer: StoreWriter, counts: NDArray[np.uint32], nodes: NodeOrder, work: Path
    ) -> Relation:
        relation: SourceRelation = self._relation
        folder = f"edges/{relation.src}___{relation.name}___{relation.dst}"
        if nodes.order is not None:
            counts = counts[nodes.order]
        graph = writer.graph(f"{folder}/blocks")
        edge_dtype = self._dtypes.edge or None
        packer = GraphPacker(
            self._options.block_bytes, self._dtypes.node, edge_dtype, 0, graph.append
        )
        num_edges = 0
        for columns in sorted_columns(
            self._source, relation, counts, nodes.rank, self._options, self._dtypes, self._mem,
            work, self._progress,
        ):  # fmt: skip
            packer.append(columns.degrees, columns.sources, columns.edge_ids)
            num_edges += columns.sources.size
        first_node = packer.close()
        num_blocks = graph.close()
        writer.side(f"{folder}/first_node", first_node)
        return Relation(
            src=relation.src,
            name=relation.name,
            dst=relation.dst,
            num_edges=num_edges,
            num_blocks=num_blocks,
            path=f"{folder}/blocks",
            first_node_path=f"{folder}/first_node",
            edge_id_dtype=edge_dtype,
            num_source_edges=relation.num_edges,
        )

    def _labels(self) -> list[SourceRows]:
        label = self._source.label(self._type)
        return [label] if label is not None else []

    def _row_arrays(self) -> list[tuple[SourceRows, RowArray]]:
        """Features, then labels, with the arrays that they become."""
        folder = f"nodes/{self._type}"
        found = []
        for rows in self._source.features(self._type):
            path = f"{folder}/features/{rows.name}"
            array = RowArray(path, self._options.dtype, rows.num_rows, rows.row_shape, rows.held)
            found.append((rows, array))
        for rows in self._labels():
            path = f"{folder}/label"
            found.append(
                (rows, RowArray(path, rows.dtype.name, rows.num_rows, rows.row_shape, rows.held))
            )
        return found

    def _write_nodes(
        self,
        writer: StoreWriter,
        nodes: NodeOrder,
        splits: dict[str, NDArray[np.int64]],
        work: Path,
    ) -> NodeType:
        features, label = {}, None
        for rows, array in self._row_arrays():
            is_label = array.path.endswith("/label")
            allow_nan = self._options.allow_nan or is_label
            pieces = checked_rows(self._source, self._type, rows, array.dtype, allow_nan, self._mem)
            write_rows(writer, array, pieces, nodes.rank, self._mem, work, self._progress)
            if is_label:
                label = array
            else:
                features[rows.name] = array
        folder = f"nodes/{self._type}"
        ids = {
            name: RowArray(f"{folder}/{name}", self._dtypes.node, self._num_nodes)
            for name in ("original_id", "store_id")
        }
        for name, values in (("original_id", nodes.order), ("store_id", nodes.rank)):
            self._write_ids(writer, ids[name], values)
        arrays = {
            name: RowArray(f"{folder}/splits/{name}", "int64", values.size)
            for name, values in splits.items()
        }
        for name, values in splits.items():
            self._write_ids(writer, arrays[name], values)
        return NodeType(
            name=self._type,
            first=0,
            num_nodes=self._num_nodes,
            original_id=ids["original_id"],
            store_id=ids["store_id"],
            label=label,
            features=features,
            splits=arrays,
        )

    def _write_ids(self, writer: StoreWriter, array: RowArray, values: NDArray[Any] | None) -> None:
        with writer.rows(array) as out:
            for piece in _pieces(values, array.num_rows):
                out.append(piece.astype(numpy_dtype(array.dtype), copy=False))


def _pieces(values: NDArray[Any] | None, size: int) -> Iterator[NDArray[Any]]:
    """An array in pieces; None stands for 0, 1, 2, ..."""
    for first in range(0, size, _SPLIT_ROWS):
        stop = min(first + _SPLIT_ROWS, size)
        yield np.arange(first, stop) if values is None else values[first:stop]
