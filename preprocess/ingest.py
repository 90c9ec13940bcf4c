"""From a source to a store: the stages in order, within one budget, whole or absent."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace, StoreExists
from blockstore.format import FORMAT_VERSION, Manifest, NodeType, Relation, RowArray
from blockstore.pack import GraphPacker
from blockstore.store import numpy_dtype
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from preprocess.graph import GraphStages
from preprocess.options import IngestOptions
from preprocess.plan import Facts, check_longest, edge_id_dtype, plan_disk, plan_memory
from preprocess.progress import Progress
from preprocess.result import IngestResult
from preprocess.source import Source, SourceRows
from preprocess.stages.csc import Widths
from preprocess.stages.rows import checked_features, chunk_rows, place_rows
from preprocess.stages.scan import check_splits

_PIECE_ROWS = 1 << 16


def ingest(
    source: Source,
    target: Path,
    options: IngestOptions,
    progress: Progress,
    fresh: bool = False,
) -> IngestResult:
    """Write the store.

    Raises BadInput, StoreExists, BudgetTooSmall, OutOfSpace; nothing is left behind then.
    """
    if target.exists():
        raise StoreExists(f"{target}: exists already; remove it, or choose another name")
    options.check()
    del fresh
    return IngestResult(_Ingest(source, target, options, progress).run(), ())


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
        node = options.node_dtype(self._num_nodes)
        num_edges = self._relation.num_edges
        self._widths = Widths.of(
            node, self._num_nodes, edge_id_dtype(num_edges, options), num_edges
        )
        self._features = [
            (rows, self._row_array(f"features/{rows.name}", rows, options.dtype))
            for rows in source.features(self._type)
        ]
        label = source.label(self._type)
        self._label = label and (label, self._row_array("label", label, label.dtype.name))
        self._splits = [
            (rows, RowArray(f"nodes/{self._type}/splits/{rows.name}", "int64", rows.num_rows))
            for rows in source.splits(self._type)
        ]
        self._ids = {
            name: RowArray(f"nodes/{self._type}/{name}", node, self._num_nodes)
            for name in ("original_id", "store_id")
        }
        self._facts = self._collect_facts()
        self._memory = plan_memory(self._facts, options)

    def _row_array(self, name: str, rows: SourceRows, dtype: str) -> RowArray:
        path = f"nodes/{self._type}/{name}"
        return RowArray(path, dtype, rows.num_rows, rows.row_shape, rows.held)

    def _collect_facts(self) -> Facts:
        held = [*self._features, *([self._label] if self._label else []), *self._splits]
        arrays = (*(array for _, array in held), *self._ids.values())
        widest = max((rows.row_bytes for rows, _ in held), default=1)
        return Facts(self._num_nodes, self._relation.num_edges, arrays, widest)

    def run(self) -> Manifest:
        """All stages."""
        self._check_disk()
        check_splits(self._source, self._type)
        with work_folder(self._target) as work:
            graph = GraphStages(
                self._source, self._relation, self._options, self._widths, self._memory.share,
                work, self._progress,
            )  # fmt: skip
            graph.count()
            check_longest(self._facts, self._options, self._memory, graph.longest_bytes)
            with (
                graph,
                StoreWriter(
                    self._target,
                    block_bytes=self._options.block_bytes,
                    buffer_bytes=self._memory.buffer,
                ) as writer,
            ):
                nodes = graph.place_nodes()
                relation = self._write_graph(writer, graph)
                node_type = self._write_nodes(
                    writer, nodes and nodes.order, nodes and nodes.rank, work
                )
                return writer.commit(self._manifest(node_type, relation))

    def _check_disk(self) -> None:
        """Raises OutOfSpace before anything is written, where the store cannot fit."""
        plan = plan_disk(self._facts, self._options, self._memory)
        folder = self._target.absolute().parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if plan.store + plan.temporary > free:
            raise OutOfSpace(
                f"{folder}: found {format_bytes(free)} free, expected {format_bytes(plan.store)} "
                f"for the store and {format_bytes(plan.temporary)} for its making; free some "
                "space, or choose another disk"
            )

    def _write_graph(self, writer: StoreWriter, stages: GraphStages) -> Relation:
        relation, widths = self._relation, self._widths
        folder = f"edges/{relation.src}___{relation.name}___{relation.dst}"
        graph = writer.graph(f"{folder}/blocks")
        packer = GraphPacker(self._options.block_bytes, widths.node, widths.edge, 0, graph.append)
        num_edges = 0
        for columns in stages.columns():
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
            edge_id_dtype=widths.edge,
            num_source_edges=relation.num_edges,
        )

    def _write_nodes(
        self,
        writer: StoreWriter,
        order: NDArray[Any] | None,
        rank: NDArray[Any] | None,
        work: Path,
    ) -> NodeType:
        share, options = self._memory.share, self._options
        self._write_ids(writer, self._ids["original_id"], order)
        self._write_ids(writer, self._ids["store_id"], rank)
        for rows, array in self._features:
            pieces = checked_features(self._source, rows, array.dtype, options.allow_nan, share)
            self._write_rows(writer, array, pieces, rank, work)
        if self._label:
            rows, array = self._label
            pieces = self._source.rows(rows, chunk_rows(rows.row_bytes, share))
            self._write_rows(writer, array, pieces, rank, work)
        for rows, array in self._splits:
            with writer.rows(array) as out:
                for ids in self._source.rows(rows, _PIECE_ROWS):
                    out.append(ids.astype(np.int64))
        return NodeType(
            name=self._type,
            first=0,
            num_nodes=self._num_nodes,
            original_id=self._ids["original_id"],
            store_id=self._ids["store_id"],
            label=self._label[1] if self._label else None,
            features={rows.name: array for rows, array in self._features},
            splits={rows.name: array for rows, array in self._splits},
        )

    def _write_rows(
        self,
        writer: StoreWriter,
        array: RowArray,
        pieces: Iterator[NDArray[Any]],
        rank: NDArray[Any] | None,
        work: Path,
    ) -> None:
        with writer.rows(array) as out:
            place_rows(pieces, array, rank, self._memory.share, work, out.append, self._progress)

    def _write_ids(self, writer: StoreWriter, array: RowArray, values: NDArray[Any] | None) -> None:
        """`values` None: each node keeps its number."""
        dtype = numpy_dtype(array.dtype)
        with writer.rows(array) as out:
            for first in range(0, array.num_rows, _PIECE_ROWS):
                stop = min(first + _PIECE_ROWS, array.num_rows)
                piece = np.arange(first, stop) if values is None else values[first:stop]
                out.append(piece.astype(dtype))

    def _manifest(self, node_type: NodeType, relation: Relation) -> Manifest:
        options = self._options
        return Manifest(
            format=FORMAT_VERSION,
            block_bytes=options.block_bytes,
            id_dtype=self._widths.node,
            types=(node_type,),
            relations=(relation,),
            order=options.order,
            undirected=options.undirected,
            duplicates="drop" if options.drop_equal else "keep",
            self_loops=options.self_loops,
        )


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target for temporary files; it is removed, with those of killed runs."""
    parent = target.absolute().parent
    for left in parent.glob(f".{target.name}.work-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    made = [p for p in (parent, *parent.parents) if not p.exists()]
    work = parent / f".{target.name}.work-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not target.exists():
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()
