"""The stages of one relation: its blocks, its edge arrays, its splits.

Where edge arrays lie inside the blocks, sorted columns wait on disk until these are in the same
order; else columns go into blocks as they are sorted.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, Relation, RowArray, crc_path
from blockstore.pack import GraphPacker
from preprocess.arrays import write_features, write_split
from preprocess.errors import BadInput
from preprocess.graph import GraphStages, counts_file
from preprocess.kernels.edges import cut_ranges
from preprocess.plan import (
    inline_stage,
    needs_columns,
    place_dtype,
    reads_columns,
    sort_stage,
)
from preprocess.run import Facts, Run
from preprocess.source import SourceRows
from preprocess.stages.array_file import ArrayFile, load_array, save_array
from preprocess.stages.columns import COLUMNS, DEGREES
from preprocess.stages.edge_places import EdgePlaces, placed_rows
from preprocess.stages.rows import Emit, dense_bytes, scatter_rows, source_chunk

_PLACES = "places"  # temporary files of the relation in hand
_DEGREES, _SOURCES, _IDS = "sorted.degrees", "sorted.sources", "sorted.ids"
_WEIGHTS, _TIMES = "weights", "times"
_COLUMN_BYTES = 16  # a column on its way into a block


class RelationStages:
    """One relation on its way into the store."""

    def __init__(self, run: Run, graph: GraphStages, number: int) -> None:
        self._run, self._graph, self._number = run, graph, number
        self._relation = run.contents.relations[number]
        self._num_edges = 0  # stored, once columns are sorted

    def write(self) -> Relation:
        """All stages; what the manifest says."""
        relation, run = self._relation, self._run
        if relation.inline:
            self._sort()
        num_blocks = self._pack()
        features = {}
        for i, rows in enumerate(relation.features):
            array = msgspec.structs.replace(rows.array, num_rows=self._num_edges)
            spent = [_PLACES] if i == len(relation.features) - 1 else []
            write_features(run, rows._replace(array=array), self._place, spent)
            features[rows.source.name] = array
        for rows in relation.splits:
            write_split(run, rows)
        source = relation.source
        return Relation(
            src=source.src,
            name=source.name,
            dst=source.dst,
            num_edges=self._num_edges,
            num_blocks=num_blocks,
            path=f"{relation.path}/blocks",
            first_node_path=f"{relation.path}/first_node",
            edge_id_dtype=relation.edge_id_dtype,
            num_source_edges=source.num_edges,
            has_weights=relation.weight is not None,
            has_times=relation.time is not None,
            first_edge_path=f"{relation.path}/first_edge",
            features=features,
            splits={r.source.name: r.array for r in relation.splits},
            reverse_of=relation.reverse_of,
        )

    def _sort(self) -> None:
        """Sorted columns to files, then the arrays that lie beside them."""
        run, relation = self._run, self._relation
        made = [_DEGREES, _SOURCES, _PLACES, *([_IDS] if self._sorts_ids else [])]
        facts = run.stage(
            sort_stage(relation), self._save_columns, made=made, spent=self._counts_and_columns()
        )
        self._num_edges = facts["num_edges"]
        left = len(relation.inline)
        for rows, name, dtype in (
            (relation.ids, _IDS, relation.edge_id_dtype),
            (relation.weight, _WEIGHTS, WEIGHT_DTYPE),
            (relation.time, _TIMES, TIME_DTYPE),
        ):
            if rows is not None and dtype is not None:
                left -= 1
                spent = [] if left or relation.features else [_PLACES]
                self._order_inline(rows, name, dtype, spent)

    @property
    def _sorts_ids(self) -> bool:
        """Whether ids of edges are their positions, which are sorted with them."""
        return bool(self._relation.edge_id_dtype) and self._relation.ids is None

    def _order_inline(self, rows: SourceRows, name: str, dtype: str, spent: list[str]) -> None:
        run, array = self._run, RowArray(rows.name, dtype, self._num_edges)

        def body() -> None:
            run.path(name).unlink(missing_ok=True)
            with ArrayFile(run.path(name), dtype) as file:
                self._place(_inline_pieces(run, rows, dtype), array, file.append)

        run.stage(inline_stage(self._relation, rows), body, made=[name], spent=spent)

    def _pack(self) -> int:
        """Columns into blocks; returns their number."""
        run, relation = self._run, self._relation
        path = relation.path
        arrays = [f"{path}/{n}" for n in ("blocks", "first_node", "first_edge")]
        if relation.inline:
            body = self._pack_saved
            made = []
            spent = [_DEGREES, _SOURCES, _IDS, _WEIGHTS, _TIMES]
        else:
            body = self._pack_sorted
            made = [_PLACES] if relation.features else []
            spent = self._counts_and_columns()
        facts = run.stage(path, body, made=made, spent=spent, arrays=[*arrays, crc_path(arrays[0])])
        self._graph.release_columns()
        self._num_edges = facts["num_edges"]
        num_blocks: int = facts["num_blocks"]
        return num_blocks

    def _counts_and_columns(self) -> list[str]:
        """Temporary files that nobody needs once the columns are sorted."""
        contents = self._run.contents
        columns = needs_columns(self._run.options) and reads_columns(contents)
        return [counts_file(self._number), *([COLUMNS, DEGREES] if columns else [])]

    def _save_columns(self) -> Facts:
        run, relation = self._run, self._relation
        degrees = np.zeros(relation.dst.num_nodes, np.uint32)
        with ExitStack() as stack:
            sources = stack.enter_context(_new(run, _SOURCES, relation.widths.node))
            ids = None
            if self._sorts_ids and relation.edge_id_dtype:
                ids = stack.enter_context(_new(run, _IDS, relation.edge_id_dtype))
            places = stack.enter_context(self._edge_places())
            for c in self._graph.sorted_relation(self._number, self._sort_share()):
                degrees[c.first : c.first + c.degrees.size] = c.degrees
                sources.append(c.sources)
                assert c.edge_ids is not None
                places.append(c.edge_ids)
                if ids is not None:
                    ids.append(c.edge_ids)
            save_array(run.path(_DEGREES), degrees)
            places.write(run.path(_PLACES))
            return {"num_edges": sources.size}

    def _pack_sorted(self) -> Facts:
        run, relation = self._run, self._relation
        with ExitStack() as stack:
            places = stack.enter_context(self._edge_places()) if relation.features else None
            graph = run.writer.graph(f"{relation.path}/blocks")
            packer = self._packer(graph.append)
            for c in self._graph.sorted_relation(self._number, self._sort_share()):
                packer.append(c.degrees, c.sources, c.edge_ids)
                if places is not None:
                    assert c.edge_ids is not None
                    places.append(c.edge_ids)
            facts = self._close(packer, graph.close)
            if places is not None:
                places.write(run.path(_PLACES))
        return facts

    def _pack_saved(self) -> Facts:
        run, relation = self._run, self._relation
        degrees = load_array(run.path(_DEGREES), np.uint32)
        kept = [
            (_SOURCES, relation.widths.node),
            (_IDS, relation.edge_id_dtype),
            (_WEIGHTS, WEIGHT_DTYPE if relation.weight else None),
            (_TIMES, TIME_DTYPE if relation.time else None),
        ]
        graph = run.writer.graph(f"{relation.path}/blocks")
        packer = self._packer(graph.append)
        with ExitStack() as stack, run.progress.stage("pack", self._num_edges, "edges") as stage:
            files = [
                stack.enter_context(ArrayFile(run.path(name), dtype)) if dtype else None
                for name, dtype in kept
            ]
            done = 0
            for low, high, count in self._ranges(degrees):
                parts = [None if f is None else f.read(done, count) for f in files]
                sources, ids, weights, times = parts
                assert sources is not None
                packer.append(degrees[low:high].astype(np.int64), sources, ids, weights, times)
                done += count
                stage.advance(count)
        return self._close(packer, graph.close)

    def _ranges(self, degrees: NDArray[np.uint32]) -> list[tuple[int, int, int]]:
        """(first column, behind the last, edges) of what is packed together."""
        each = self._relation.item_bytes
        longest = int(degrees.max(initial=0)) * each + _COLUMN_BYTES
        most = max(longest, self._run.memory.share // 4)
        none = np.empty(0, np.int64)
        count = cut_ranges(degrees, each, _COLUMN_BYTES, most, none, none)
        bounds, sizes = np.zeros(count + 1, np.int64), np.empty(count, np.int64)
        cut_ranges(degrees, each, _COLUMN_BYTES, most, bounds, sizes)
        return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), sizes.tolist(), strict=True))

    def _packer(self, emit: Any) -> GraphPacker:
        run, relation = self._run, self._relation
        return GraphPacker(
            run.options.block_bytes, relation.widths.node, relation.edge_id_dtype,
            relation.dst.first, emit, weights=relation.weight is not None,
            times=relation.time is not None,
        )  # fmt: skip

    def _close(self, packer: GraphPacker, close: Any) -> Facts:
        first_node = packer.close()
        num_blocks, first_edge = close(), packer.first_edges()
        self._run.writer.side(f"{self._relation.path}/first_node", first_node)
        self._run.writer.side(f"{self._relation.path}/first_edge", first_edge)
        return {"num_blocks": num_blocks, "num_edges": int(first_edge[-1])}

    def _sort_share(self) -> int:
        share = self._run.memory.share
        return share // 4 * 3 if self._relation.has_rows else share

    def _edge_places(self) -> EdgePlaces:
        relation, run = self._relation, self._run
        num_ids = relation.source.num_edges * (2 if relation.undirected else 1)
        return EdgePlaces(num_ids, place_dtype(relation), run.memory.share // 4, run.work.path)

    def _place(self, pieces: Iterator[NDArray[Any]], array: RowArray, emit: Emit) -> None:
        """Rows, one an edge of the source, into the order of the blocks."""
        run, dtype = self._run, place_dtype(self._relation)
        with ArrayFile(run.path(_PLACES), dtype) as places:
            placed = placed_rows(pieces, places, self._relation.source.num_edges)
            scatter_rows(
                placed, array, np.dtype(dtype), run.memory.share, run.work.path, emit,
                run.progress, dense_bytes(run.memory.share),
            )  # fmt: skip


def _new(run: Run, name: str, dtype: str) -> ArrayFile:
    run.path(name).unlink(missing_ok=True)
    return ArrayFile(run.path(name), dtype)


def _inline_pieces(run: Run, rows: SourceRows, dtype: str) -> Iterator[NDArray[Any]]:
    """Weights or times as stored.  Raises BadInput: a weight that is no number, or negative."""
    done = 0
    for piece in run.source.rows(rows, source_chunk(rows, run.memory.share)):
        values = piece.reshape(-1).astype(dtype)
        if dtype == WEIGHT_DTYPE:
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            if bad.size:
                raise BadInput.at(
                    f"{rows.where}[{done + bad[0]}]", f"weight {values[bad[0]]:g}",
                    "finite weights of at least 0", "give the array another name than weight",
                )  # fmt: skip
        yield values
        done += values.size
