"""Features of a type out of its neighbors' into a store: one more array, within one budget.

The rows of a target's neighbors are added in the order of their store ids, in float32, whatever
the memory and the threads: sums of a range of targets are in memory, and rows pass by in order.
"""

import shutil
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock, OutOfSpace
from blockstore.extend import StoreExtender
from blockstore.format import Manifest, RowArray
from blockstore.store import Store, numpy_dtype, open_store, read_rows
from blockstore.units import format_bytes
from preprocess.derive.plan import Derivation, DerivePlan, Resolved, plan_derivation, resolve
from preprocess.kernels import derive as kernels
from preprocess.kernels.rows import group_places
from preprocess.memory import give_back_freed
from preprocess.progress import Progress
from preprocess.result import QuantizationError
from preprocess.stages.ahead import read_ahead
from preprocess.stages.buckets import Buckets
from preprocess.stages.csc import Columns, Records, sorted_columns
from preprocess.stages.derived import DerivedRows
from preprocess.stages.slots import SlotCopies
from preprocess.stored import rows_ahead, stored_edges, to_floats

THREADS = 3

# (origins ascending, targets): numbers in their types, of targets sometimes in a range of them
Edges = Iterator[tuple[NDArray[Any], NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class DeriveResult:
    """What has been added to a store."""

    manifest: Manifest
    resolved: Resolved
    plan: DerivePlan
    without_neighbors: int  # targets: their rows are zeros
    quantization: QuantizationError | None
    read_bytes: int
    written_bytes: int
    elapsed_s: float
    peak_bytes: int

    def text(self, path: Path, op: str) -> str:
        """For a person."""
        new, target, origin = self.resolved.array, self.resolved.target, self.resolved.origin
        shape = "x".join(map(str, (new.num_rows, *new.row_shape)))
        plan = self.plan
        passes = 1 if plan.spill else max(1, plan.num_ranges)
        lines = [
            f"{path}: {new.path}, {new.dtype} {shape}: {op} of the {origin.name} rows over "
            f"{self.resolved.title}, fingerprint {self.manifest.fingerprint}",
            f"zeros       {self.without_neighbors:,} of {target.num_nodes:,} {target.name} nodes "
            "have no neighbor",
            f"took        {self.elapsed_s:.1f} s, {passes} reads of the rows; "
            f"{format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} written, at "
            f"most {format_bytes(self.peak_bytes)} of memory",
        ]
        if self.quantization is not None:
            lost = self.quantization
            lines.append(f"int8        off by {lost.largest:.3g} at most, {lost.rms:.3g} rms")
        return "\n".join(lines)


def derive(
    path: Path,
    derivation: Derivation,
    progress: Progress,
    mem_bytes: int = 2 << 30,
    threads: int = THREADS,
) -> DeriveResult:
    """Add the array to the store at `path`.

    Raises BadInput, BudgetTooSmall, OutOfSpace, StoreBusy, StoreExists, NotAStore, CorruptBlock;
    the store is as it was then.
    """
    give_back_freed()
    manifest = open_store(path).manifest
    plan = plan_derivation(manifest, resolve(manifest, derivation, str(path)), mem_bytes)
    with StoreExtender(path, plan.buffer) as extender:
        resolved = resolve(extender.store.manifest, derivation, str(path))  # now that it is locked
        run = _Derive(extender, resolved, derivation.op, mem_bytes, progress, threads)
        with progress.recorded(resolved.array.path) as took:
            plan, without, quantization = run.run()
            manifest = extender.commit(resolved.extended(extender.store.manifest))
    return DeriveResult(
        manifest, resolved, plan, without, quantization,
        took.read_bytes, took.written_bytes, took.elapsed_s, took.peak_bytes,
    )  # fmt: skip


class _Derive:
    """One run."""

    def __init__(
        self,
        extender: StoreExtender,
        resolved: Resolved,
        op: str,
        mem_bytes: int,
        progress: Progress,
        threads: int,
    ) -> None:
        self._store, self._work = extender.store, extender.work
        self._extender, self._resolved, self._op = extender, resolved, op
        self._mem_bytes, self._progress, self._threads = mem_bytes, progress, threads
        self._feature = resolved.feature
        self._scale: NDArray[np.float32] | None = None
        if self._feature.scale_path:
            self._scale = self._store.scale(self._feature)
        self._plan = self._make_plan(0)

    def run(self) -> tuple[DerivePlan, int, QuantizationError | None]:
        """All rows of the array; returns the plan, and how many targets have no neighbor."""
        resolved = self._resolved
        self._counts, by_origin = self._count()
        if not resolved.outward:
            self._plan = self._make_plan(int(by_origin.max(initial=0)))
        plan = self._plan
        with (
            ThreadPoolExecutor(self._threads, thread_name_prefix="derive") as self._pool,
            DerivedRows(
                self._extender, resolved.array, plan.piece_rows, self._progress
            ) as self._output,
        ):
            if plan.spill:
                self._by_rows(self._outward() if resolved.outward else self._inward(by_origin))
            elif resolved.outward and plan.num_ranges > 1:
                self._by_edges()
            else:
                self._by_targets(by_origin)
            quantization = self._output.close()
        without = int(np.count_nonzero(self._counts == 0))
        del self._counts, by_origin
        if resolved.copies is not None:
            self._copy_slots(resolved.copies)
        return plan, without, quantization

    def _make_plan(self, longest: int) -> DerivePlan:
        """Raises BudgetTooSmall, OutOfSpace."""
        where = self._store.path
        free = shutil.disk_usage(where).free
        plan = plan_derivation(self._store.manifest, self._resolved, self._mem_bytes, free, longest)
        need = plan.array_bytes + plan.temporary_bytes
        if need > free:
            raise OutOfSpace(
                f"{where}: found {format_bytes(free)} free, expected "
                f"{format_bytes(plan.array_bytes)} for the array and "
                f"{format_bytes(plan.temporary_bytes)} for its making; free some space, or move "
                "the store to another disk"
            )
        return plan

    def _copy_slots(self, copies: RowArray) -> None:
        """Rows of the new array once more, for the halo of its type."""
        resolved, manifest = self._resolved, self._store.manifest
        halo = resolved.target.halo
        assert halo is not None
        nodes = read_rows(self._store, halo.nodes).astype(np.uint64)
        held = msgspec.structs.replace(resolved.extended(manifest), files=self._extender.digests)
        made = Store(self._extender.tree, held)
        slots = SlotCopies(made, nodes, self._plan.share, self._work, self._progress)
        with self._extender.rows(copies) as out:
            slots.rows(resolved.array, resolved.target.first, copies, out.append)

    def _count(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Neighbors of each target; of each origin too where edges must be sorted, else none."""
        target, origin, relation, outward = self._resolved[:4]
        counts = np.zeros(target.num_nodes, np.uint32)
        by_origin = np.zeros(0 if outward else origin.num_nodes, np.uint32)
        with self._progress.stage("count edges", relation.num_edges, "edges") as stage:
            for edges in stored_edges(self._store, relation, self._plan.piece_edges):
                targets, origins = edges if not outward else edges[::-1]
                self._check(targets, target.first, target.num_nodes)
                self._check(origins, origin.first, origin.num_nodes)
                kernels.count_ids(targets, target.first, counts)
                if not outward:
                    kernels.count_ids(origins, origin.first, by_origin)
                stage.advance(targets.size)
        return counts, by_origin

    def _check(self, ids: NDArray[Any], first: int, num_nodes: int) -> None:
        """Kernels trust ids."""
        if ids.size and not first <= int(ids.min()) <= int(ids.max()) < first + num_nodes:
            raise CorruptBlock(
                f"{self._store.path / self._resolved.relation.path}: ids {ids.min()} to "
                f"{ids.max()}, expected {first} to {first + num_nodes - 1}; ingest again"
            )

    def _outward(self) -> Edges:
        """All edges of a relation whose columns are the origins."""
        target, origin, relation = self._resolved[:3]
        for edges in stored_edges(self._store, relation, self._plan.piece_edges):
            origins = (edges.targets - edges.targets.dtype.type(origin.first)).astype(
                self._resolved.origin_dtype, copy=False
            )
            yield origins, edges.sources - edges.sources.dtype.type(target.first)

    def _inward(
        self, by_origin: NDArray[np.uint32], low: int = 0, high: int | None = None
    ) -> Edges:
        """Edges of targets [low, high), sorted by origin; targets count from `low`.

        by_origin   uint32 (origins,)   how many of these edges each has
        """
        high = self._resolved.target.num_nodes if high is None else high
        plan, widths = self._plan, self._resolved.widths
        made = sorted_columns(
            self._records(low, high), by_origin, widths, False, plan.sort_bytes, self._work,
            self._progress,
        )  # fmt: skip
        dtype = np.dtype(self._resolved.origin_dtype)
        with closing(made):
            for columns in made:
                for origins, targets in _pieces(columns, plan.piece_edges):
                    yield origins.astype(dtype), targets

    def _records(self, low: int, high: int) -> Iterator[Records]:
        """Edges of targets [low, high) as columns of origins: what sorts them."""
        target, origin, relation = self._resolved[:3]
        none, first = np.empty(0, np.int64), target.first + low
        for edges in stored_edges(
            self._store, relation, self._plan.piece_edges, (first, target.first + high)
        ):
            yield Records(
                edges.sources.astype(np.int64) - origin.first,
                edges.targets.astype(np.int64) - first,
                none,
            )

    def _rows(
        self, change: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> "closing[Generator[NDArray[Any]]]":
        """All rows of the origin, in order."""
        plan = self._plan
        return closing(rows_ahead(self._store, self._feature, plan.scan_bytes, plan.lanes, change))

    def _floats(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        return to_floats(rows.reshape(-1, self._feature.row_items), self._feature, self._scale)

    def _by_targets(self, by_origin: NDArray[np.uint32]) -> None:
        """Edges of a range of targets come in order beside the rows, which are read each time."""
        outward, plan = self._resolved.outward, self._plan
        sums = self._new_sums(self._counts.size)
        for number, (low, high) in enumerate(self._ranges()):
            edges: Edges = iter(())
            if outward:
                edges = self._outward()
            elif self._resolved.relation.num_edges:
                if plan.num_ranges > 1:
                    self._count_origins(low, high, by_origin)
                edges = self._inward(by_origin, low, high)
            self._add_range(number, edges, sums, low, high)

    def _count_origins(self, low: int, high: int, by_origin: NDArray[np.uint32]) -> None:
        target, origin, relation = self._resolved[:3]
        by_origin[:] = 0
        columns = (target.first + low, target.first + high)
        for edges in stored_edges(self._store, relation, self._plan.piece_edges, columns):
            kernels.count_ids(edges.sources, origin.first, by_origin)

    def _by_edges(self) -> None:
        """Edges to buckets by range of targets first; then, for each range, rows are read."""
        plan, resolved = self._plan, self._resolved
        sizes, per_range = self._sizes(), plan.range_nodes
        parts: list[tuple[Any, int]] = [(resolved.origin_dtype, 1), (np.uint32, 1)]
        starts = np.empty(sizes.size + 1, np.int64)
        num_edges = resolved.relation.num_edges
        record = np.dtype(resolved.origin_dtype).itemsize + 4
        in_memory = num_edges * record <= plan.sort_bytes
        path = self._work / "ranges"
        with Buckets(path, sizes, parts, in_memory, plan.sort_bytes) as buckets:
            with (
                self._progress.stage("edges by range", num_edges, "edges") as stage,
                closing(read_ahead(self._outward())) as ahead,
            ):
                for origins, targets in ahead:
                    order = np.empty(targets.size, np.int64)
                    group_places(targets, per_range, starts, order)
                    local = (targets % targets.dtype.type(per_range)).astype(np.uint32)
                    buckets.append_grouped(starts, [origins[order], local[order]])
                    stage.advance(targets.size)
            buckets.finish()
            sums = self._new_sums(per_range)
            for number, (low, high) in enumerate(self._ranges()):
                taken = _taken(buckets, number, plan.piece_edges)
                self._add_range(number, taken, sums, low, high)

    def _by_rows(self, edges: Edges) -> None:
        """A row for each edge to buckets by range of targets; then each range is added up."""
        plan, feature = self._plan, self._feature
        sizes, width = self._sizes(), self._feature.row_items
        parts: list[tuple[Any, int]] = [(numpy_dtype(feature.dtype), width), (np.uint32, 1)]
        room = plan.range_nodes * width * 2  # half of that of the sums, which come later
        with Buckets(self._work / "rows", sizes, parts, False, room) as buckets:
            self._spill(edges, buckets)
            buckets.finish()
            sums = self._new_sums(plan.range_nodes)
            total = int(sizes.sum()) * feature.row_bytes
            with self._progress.stage("add rows", total, "B") as stage:
                for number, (low, high) in enumerate(self._ranges()):
                    self._clear(sums)
                    taken = _taken(buckets, number, plan.piece_rows)
                    floats = ((self._floats(rows), targets) for rows, targets in taken)
                    with closing(read_ahead(floats)) as ahead:
                        for rows, targets in ahead:
                            origins = np.arange(targets.size, dtype=np.uint32)
                            self._add(rows, 0, origins, targets, sums)
                            stage.advance(targets.size * feature.row_bytes)
                    self._finish(sums, low, high)

    def _spill(self, edges: Edges, buckets: Buckets) -> None:
        """Rows pass by once, each copied for each of its edges."""
        plan, feature, per_range = self._plan, self._feature, self._plan.range_nodes
        starts = np.empty(plan.num_ranges + 1, np.int64)
        order, first = np.empty(plan.piece_rows, np.int64), 0
        total = feature.num_rows * feature.row_bytes
        with (
            self._progress.stage("rows by range", total, "B") as stage,
            closing(read_ahead(edges)) as edges_ahead,
            self._rows(lambda rows: rows) as all_rows,
        ):
            cursor = _Cursor(edges_ahead)
            for rows in all_rows:
                for origins, targets in cursor.until(first + rows.shape[0], plan.piece_rows):
                    group_places(targets, per_range, starts, order)
                    grouped = order[: targets.size]
                    local = (targets % targets.dtype.type(per_range)).astype(np.uint32)
                    chosen = origins[grouped].astype(np.int64) - first
                    taken = np.take(rows, chosen, 0).reshape(-1)
                    buckets.append_grouped(starts, [taken, local[grouped]])
                first += rows.shape[0]
                stage.advance(rows.nbytes)

    def _add_range(
        self, number: int, edges: Edges, sums: NDArray[np.float32], low: int, high: int
    ) -> None:
        """All rows of the origin pass by, each into the sums of its targets, which are finished."""
        self._clear(sums)
        plan, feature, first = self._plan, self._feature, 0
        name = "add rows"
        if plan.num_ranges > 1:
            name += f", range {number + 1} of {plan.num_ranges}"
        total = feature.num_rows * feature.row_bytes
        with (
            self._progress.stage(name, total, "B") as stage,
            closing(read_ahead(edges)) as edges_ahead,
            self._rows(self._floats) as all_rows,
        ):
            cursor = _Cursor(edges_ahead)
            for rows in all_rows:
                stop = first + rows.shape[0]
                for origins, targets in cursor.until(stop, plan.piece_edges):
                    self._add(rows, first, origins, targets, sums)
                first = stop
                stage.advance(rows.shape[0] * feature.row_bytes)
        self._finish(sums, low, high)

    def _add(
        self,
        rows: NDArray[np.float32],
        first_row: int,
        origins: NDArray[Any],
        targets: NDArray[Any],
        sums: NDArray[np.float32],
    ) -> None:
        """Columns are shared out among threads: each number has its sum made by one."""
        kernel = kernels.take_greatest if self._op == "max" else kernels.add_rows
        width = sums.shape[1]
        lines = -(-width // kernels.LINE_ITEMS)
        parts = max(1, min(self._threads, lines // 2))
        ends = [min(width, lines * i // parts * kernels.LINE_ITEMS) for i in range(parts + 1)]
        others = [
            self._pool.submit(kernel, rows, first_row, origins, targets, ends[i], ends[i + 1], sums)
            for i in range(1, parts)
        ]
        kernel(rows, first_row, origins, targets, ends[0], ends[1], sums)
        for other in others:
            other.result()

    def _ranges(self) -> list[tuple[int, int]]:
        """Targets whose sums are in memory together: (first, stop) of each range."""
        step, total = self._plan.range_nodes, self._resolved.target.num_nodes
        return [(low, min(low + step, total)) for low in range(0, total, step)]

    def _sizes(self) -> NDArray[np.int64]:
        """Edges of each range."""
        firsts = [low for low, _ in self._ranges()]
        return np.add.reduceat(self._counts, firsts, dtype=np.int64)

    def _new_sums(self, num_nodes: int) -> NDArray[np.float32]:
        return np.empty(
            (min(num_nodes, self._plan.range_nodes), self._feature.row_items), np.float32
        )

    def _clear(self, sums: NDArray[np.float32]) -> None:
        value = -np.inf if self._op == "max" else 0
        list(self._pool.map(lambda part: part.fill(value), np.array_split(sums, self._threads)))

    def _finish(self, sums: NDArray[np.float32], low: int, high: int) -> None:
        done, mean = sums[: high - low], self._op == "mean"
        parts = (np.array_split(x, self._threads) for x in (self._counts[low:high], done))
        list(self._pool.map(kernels.finish_rows, *parts, repeat(mean, self._threads)))
        self._output.append(done)


class _Cursor:
    """Edges in order, as far as the rows that have come."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._origins: NDArray[Any] = np.empty(0, np.uint32)
        self._targets: NDArray[Any] = np.empty(0, np.uint32)

    def until(self, stop_row: int, most: int) -> Edges:
        """Edges whose origin is below `stop_row`, at most so many at a time."""
        while True:
            if self._origins.size == 0:
                piece = next(self._edges, None)
                if piece is None:
                    return
                self._origins, self._targets = piece
            stop = self._origins.dtype.type(stop_row)
            count = int(np.searchsorted(self._origins, stop, "left"))
            for low in range(0, count, most):
                some = slice(low, min(low + most, count))
                yield self._origins[some], self._targets[some]
            self._origins, self._targets = self._origins[count:], self._targets[count:]
            if self._origins.size:
                return


def _pieces(columns: Columns, most: int) -> Edges:
    """Columns as edges, at most so many at a time; the name of the column comes first."""
    ends = np.cumsum(columns.degrees)
    for low in range(0, columns.sources.size, most):
        high = min(low + most, columns.sources.size)
        first = int(np.searchsorted(ends, low, "right"))
        last = int(np.searchsorted(ends, high, "left")) + 1
        some_ends = np.minimum(ends[first:last], high)
        some_starts = np.maximum(ends[first:last] - columns.degrees[first:last], low)
        names = np.arange(columns.first + first, columns.first + last)
        yield np.repeat(names, some_ends - some_starts), columns.sources[low:high]


def _taken(buckets: Buckets, bucket: int, most: int) -> Edges:
    """Both parts of a bucket, at most so many records at a time."""
    total = buckets.filled(bucket)
    for first in range(0, total, most):
        count = min(most, total - first)
        yield buckets.take(bucket, 0, first, count), buckets.take(bucket, 1, first, count)
