"""The stages of one relation: its blocks, its edge arrays, its splits.

If edge arrays lie inside the blocks, the sorted columns wait on disk until these arrays are in the
same order; otherwise columns are packed into blocks as soon as they are sorted.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, Relation, RowArray, crc_path
from blockstore.pack import GraphPacker
from blockstore.writer import GraphWriter
from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile, load_array, save_array
from preprocess.ingest.contents import graph_bytes
from preprocess.ingest.graph import IngestRun, IngestStage, counts_file
from preprocess.ingest.nodes import RowStages
from preprocess.ingest.plan import IngestJob
from preprocess.kernels.edges import cut_ranges
from preprocess.pipeline.stage import Cost, Facts
from preprocess.sources.source import SourceRows
from preprocess.stages.columns import COLUMNS, DEGREES
from preprocess.stages.edge_places import EdgePlaces, placed_rows
from preprocess.stages.rows import Emit, scatter_bytes, scatter_rows, source_chunk

_PLACES = "places"  # temporary files of the current relation
_DEGREES, _SOURCES, _IDS = "sorted.degrees", "sorted.sources", "sorted.ids"
_WEIGHTS, _TIMES = "weights", "times"
_COLUMN_BYTES = 16  # memory of a column while it is packed


class RelationStages(RowStages):
    """The stages of one relation."""

    def __init__(self, job: IngestJob, number: int) -> None:
        super().__init__(job)
        self._number, self._relation = number, job.contents.relations[number]
        self._sort_name = f"{self._relation.path}: sort"
        self._place_dtype = self._relation.place_dtype
        self.place_bytes = np.dtype(self._place_dtype).itemsize

    def stages(self) -> list[IngestStage]:
        relation, made = self._relation, self._graph_stages()
        left = len(relation.features)
        for rows in relation.features:
            left -= 1
            made += self.features(rows, [] if left else [_PLACES])
        return [*made, *(self.split(rows) for rows in relation.splits)]

    def _graph_stages(self) -> list[IngestStage]:
        relation, edges = self._relation, self._relation.max_edges
        graph = graph_bytes(relation, self.job.options)
        read, passing = self._sorting()
        places = {_PLACES: edges * self.place_bytes} if relation.has_rows else {}
        work = {"sorted_edges": edges}
        if not relation.inline:
            written = graph + passing + sum(places.values())
            cost = Cost(read + passing, written, passing, work)
            return [self._packing(cost, self._pack_sorted, places, self._sorted_from())]
        files = {_DEGREES: 4 * relation.dst.num_nodes, _SOURCES: edges * self._item(_SOURCES)}
        if self._sorts_ids:
            files[_IDS] = edges * self._item(_IDS)
        held = sum(files.values()) + sum(places.values())
        stages = [
            IngestStage(
                self._sort_name, Cost(read + passing, held + passing, passing, work),
                self._save_columns, files | places, self._sorted_from(),
            ),
            *self._inline_stages(),
        ]  # fmt: skip
        cost = Cost(edges * relation.item_bytes, graph, 0, {"packed_edges": edges})
        spent = [_DEGREES, _SOURCES, _IDS, _WEIGHTS, _TIMES]
        return [*stages, self._packing(cost, self._pack_saved, {}, spent)]

    def _sorting(self) -> tuple[int, int]:
        """(bytes that sorting reads, bytes that pass through temporary files)."""
        job, relation, edges = self.job, self._relation, self._relation.max_edges
        read = relation.source_bytes
        passing = job.sort_bytes(edges, relation.widths.key_bytes, job.share)
        if job.options.needs_columns and job.columns_fit and len(job.contents.relations) == 1:
            read = passing = 0
        elif job.options.needs_columns and job.contents.reads_columns:
            read = 4 * edges + 4 * job.contents.num_nodes
        if relation.has_rows:
            passing += edges * (4 + self.place_bytes)
        return read + 4 * relation.dst.num_nodes, passing

    def _sorted_from(self) -> list[str]:
        """Temporary files that are not needed after the columns are sorted."""
        columns = self.job.options.needs_columns and self.job.contents.reads_columns
        return [counts_file(self._number), *([COLUMNS, DEGREES] if columns else [])]

    def _packing(
        self,
        cost: Cost,
        body: Callable[[IngestRun], Facts],
        files: dict[str, int],
        spent: list[str],
    ) -> IngestStage:
        path = self._relation.path
        arrays = [f"{path}/{n}" for n in ("blocks", "first_node", "first_edge")]
        arrays.append(crc_path(arrays[0]))
        return IngestStage(path, cost, body, files, spent, arrays)

    def _inline_stages(self) -> list[IngestStage]:
        """Stages that bring the arrays inside blocks into the order of the edges."""
        relation, edges, found = self._relation, self._relation.max_edges, []
        left = len(relation.inline)
        for rows, name in (
            (relation.ids, _IDS),
            (relation.weight, _WEIGHTS),
            (relation.time, _TIMES),
        ):
            if rows is None:
                continue
            left -= 1
            size = edges * self._item(name)
            passing = scatter_bytes(edges, self._item(name), self.place_bytes, self.job.share)
            read = rows.num_bytes + edges * self.place_bytes
            found.append(IngestStage(
                f"{relation.path}: {rows.name}", Cost(read + passing, size + passing, passing),
                partial(self._order_inline, rows, name), {name: size},
                [] if left or relation.features else [_PLACES],
            ))  # fmt: skip
        return found

    def relation(self, run: IngestRun | None) -> Relation:
        """The relation's manifest entry, after all stages; before a run, with upper bounds."""
        relation, source, options = self._relation, self._relation.source, self.job.options
        num_blocks = -(-graph_bytes(relation, options) // options.block_bytes)
        if run is not None:
            num_blocks = run.facts(relation.path)["num_blocks"]
        features = {rows.source.name: self.sized(rows.array, run) for rows in relation.features}
        return Relation(
            src=source.src,
            name=source.name,
            dst=source.dst,
            num_edges=self._num_edges(run),
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

    @property
    def _sorts_ids(self) -> bool:
        """Whether edge ids are positions in the source, which are sorted with the edges."""
        return bool(self._relation.edge_id_dtype) and self._relation.ids is None

    @property
    def _edge_files(self) -> dict[str, str | None]:
        """Temporary files of the blocks' sections with their dtypes; None: blocks lack it."""
        relation = self._relation
        return {
            _SOURCES: relation.widths.node,
            _IDS: relation.edge_id_dtype,
            _WEIGHTS: WEIGHT_DTYPE if relation.weight else None,
            _TIMES: TIME_DTYPE if relation.time else None,
        }

    def _dtype(self, name: str) -> str:
        found = self._edge_files[name]
        assert found is not None
        return found

    def _item(self, name: str) -> int:
        return np.dtype(self._dtype(name)).itemsize

    def _num_edges(self, run: IngestRun | None) -> int:
        """Number of stored edges; before a run, an upper bound."""
        if run is None:
            return self._relation.max_edges
        found: int = run.facts(self._relation.path)["num_edges"]
        return found

    def sized(self, array: RowArray, run: IngestRun | None) -> RowArray:
        """The array with one row for each stored edge."""
        return msgspec.structs.replace(array, num_rows=self._num_edges(run))

    def _order_inline(self, rows: SourceRows, name: str, run: IngestRun) -> None:
        dtype = self._dtype(name)
        num_edges = run.facts(self._sort_name)["num_edges"]
        with _new(run, name, dtype) as file:
            pieces = _inline_pieces(self.job, rows, dtype)
            self.place(run, pieces, RowArray(rows.name, dtype, num_edges), file.append)

    def _save_columns(self, run: IngestRun) -> Facts:
        relation = self._relation
        degrees = np.zeros(relation.dst.num_nodes, np.uint32)
        with ExitStack() as stack:
            sources = stack.enter_context(_new(run, _SOURCES, relation.widths.node))
            ids = None
            if self._sorts_ids:
                ids = stack.enter_context(_new(run, _IDS, self._dtype(_IDS)))
            places = stack.enter_context(self._edge_places(run))
            for c in run.sorted_relation(self._number, self._sort_share()):
                degrees[c.first : c.first + c.degrees.size] = c.degrees
                sources.append(c.sources)
                assert c.edge_ids is not None
                places.append(c.edge_ids)
                if ids is not None:
                    ids.append(c.edge_ids)
            save_array(run.path(_DEGREES), degrees)
            places.write(run.path(_PLACES))
            return {"num_edges": sources.size}

    def _pack_sorted(self, run: IngestRun) -> Facts:
        relation = self._relation
        with ExitStack() as stack:
            places = stack.enter_context(self._edge_places(run)) if relation.features else None
            graph = run.writer.graph(f"{relation.path}/blocks")
            packer = self._packer(graph.append)
            for c in run.sorted_relation(self._number, self._sort_share()):
                packer.append(c.degrees, c.sources, c.edge_ids)
                if places is not None:
                    assert c.edge_ids is not None
                    places.append(c.edge_ids)
            facts = self._close(run, packer, graph)
            if places is not None:
                places.write(run.path(_PLACES))
        return facts

    def _pack_saved(self, run: IngestRun) -> Facts:
        degrees = load_array(run.path(_DEGREES), np.uint32)
        num_edges = int(degrees.sum(dtype=np.int64))
        graph = run.writer.graph(f"{self._relation.path}/blocks")
        packer = self._packer(graph.append)
        with ExitStack() as stack, run.progress.stage("pack", num_edges, "edges") as stage:
            files = [
                stack.enter_context(ArrayFile(run.path(name), dtype)) if dtype else None
                for name, dtype in self._edge_files.items()
            ]
            done = 0
            for low, high, count in self._ranges(degrees):
                parts = [None if f is None else f.read(done, count) for f in files]
                sources, ids, weights, times = parts
                assert sources is not None
                packer.append(degrees[low:high].astype(np.int64), sources, ids, weights, times)
                done += count
                stage.advance(count)
        return self._close(run, packer, graph)

    def _ranges(self, degrees: NDArray[np.uint32]) -> list[tuple[int, int, int]]:
        """(first column, stop, edges) of each range of columns that is packed together."""
        each = self._relation.item_bytes
        longest = int(degrees.max(initial=0)) * each + _COLUMN_BYTES
        maximum = max(longest, self.job.share // 4)
        bounds, sizes = cut_ranges(degrees, each, _COLUMN_BYTES, maximum)
        return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), sizes.tolist(), strict=True))

    def _packer(self, emit: Any) -> GraphPacker:
        relation, block_bytes = self._relation, self.job.options.block_bytes
        return GraphPacker(block_bytes, relation.layout, relation.dst.first, emit)

    def _close(self, run: IngestRun, packer: GraphPacker, graph: GraphWriter) -> Facts:
        first_node = packer.close()
        num_blocks, first_edge = graph.close(), packer.first_edges()
        run.writer.side(f"{self._relation.path}/first_node", first_node)
        run.writer.side(f"{self._relation.path}/first_edge", first_edge)
        run.release_columns()
        return {"num_blocks": num_blocks, "num_edges": int(first_edge[-1])}

    def _sort_share(self) -> int:
        share = self.job.share
        return share // 4 * 3 if self._relation.has_rows else share

    def _edge_places(self, run: IngestRun) -> EdgePlaces:
        relation = self._relation
        num_ids = relation.source.num_edges * (2 if relation.undirected else 1)
        return EdgePlaces(num_ids, self._place_dtype, self.job.share // 4, run.folder)

    def place(
        self, run: IngestRun, pieces: Iterator[NDArray[Any]], array: RowArray, emit: Emit
    ) -> None:
        """Bring rows, one for each edge of the source, into the order of the blocks."""
        dtype, share = np.dtype(self._place_dtype), self.job.share
        with ArrayFile(run.path(_PLACES), dtype) as places:
            placed = placed_rows(pieces, places, self._relation.source.num_edges)
            scatter_rows(placed, array, dtype, share, run.folder, emit, run.progress)


def _new(run: IngestRun, name: str, dtype: str) -> ArrayFile:
    run.path(name).unlink(missing_ok=True)
    return ArrayFile(run.path(name), dtype)


def _inline_pieces(job: IngestJob, rows: SourceRows, dtype: str) -> Iterator[NDArray[Any]]:
    """Weights or times as stored.  Raises BadInput: a weight that is no number, or negative."""
    done = 0
    for piece in job.source.rows(rows, source_chunk(rows, job.share)):
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
