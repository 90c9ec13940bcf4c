"""Derive features of a type from those of its neighbors, as a new array, within a memory budget.

The rows of a target's neighbors are added in the order of their store ids, in float32, whatever
the memory and the threads.  The sums of all targets are in memory, for as many columns as fit:
edges and rows are read in order, once for each slice of columns.
"""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.extend import StoreExtender
from blockstore.format import Manifest, RowArray
from blockstore.store import Store, open_store, read_rows
from preprocess.derive.plan import (
    Derivation,
    DerivePlan,
    ResolvedDerivation,
    plan_derivation,
    resolve,
)
from preprocess.errors import BadInput
from preprocess.files.ahead import read_ahead
from preprocess.files.array_file import ArrayFile, load_array, save_array
from preprocess.files.buckets import passing_bytes
from preprocess.files.store import cut_columns, floats_ahead, joined_columns, stored_edges
from preprocess.ingest.contents import row_disk_bytes
from preprocess.kernels import hops as kernels
from preprocess.kernels.edges import Records, count_ids
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import QuantizationError, Ran, StageResult
from preprocess.pipeline.stage import Cost, Facts, PipelineRun, RunPlan, Stage, resumable
from preprocess.pipeline.work import sign
from preprocess.stages.csc import RawEdges, ready, sorted_columns
from preprocess.stages.rows import Quantizer, checked_sums, scatter_bytes
from preprocess.stages.slots import SlotCopies

THREADS = 3
_STEP = 1 << 14  # targets whose sums are finished together
_PIPELINE = 1  # increased when stages or their files change: older work folders are not resumed
# temporary files: neighbors of each target, edges of each origin, edges by origin
_COUNTS, _BY_ORIGIN, _ORIGINS, _TARGETS = "counts", "by-origin", "origins", "targets"

# (origins ascending, targets), as numbers inside their types
Edges = Iterator[tuple[NDArray[Any], NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class DeriveResult(Ran):
    """The derived array, and the cost of the run."""

    manifest: Manifest
    resolved: ResolvedDerivation
    plan: DerivePlan
    without_neighbors: int  # targets without neighbors, whose rows are zeros
    quantization: QuantizationError | None
    stages: tuple[StageResult, ...]

    def text(self, path: Path, op: str) -> str:
        new, target, origin = self.resolved.array, self.resolved.target, self.resolved.origin
        shape = "x".join(map(str, (new.num_rows, *new.row_shape)))
        lines = [
            f"{path}: {new.path}, {new.dtype} {shape}: {op} of the {origin.name} rows over "
            f"{self.resolved.relation.title}, fingerprint {self.manifest.fingerprint}",
            f"zeros       {self.without_neighbors:,} of {target.num_nodes:,} {target.name} nodes "
            "have no neighbor",
            f"took        {self.elapsed_s:.1f} s, {self.plan.num_slices} slices of "
            f"{self.plan.width} columns; {self.moved}",
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
    the store is unchanged then.  If the disk fills up, or the run is stopped, finished stages stay
    beside the store, and the same call resumes after them.
    """
    path = path.resolve()

    def stages_for(manifest: Manifest) -> DeriveStages:
        resolved = resolve(manifest, derivation, str(path))
        plan = plan_derivation(manifest, resolved, mem_bytes)
        return DeriveStages(manifest, resolved, plan, derivation.op)

    with StoreExtender(path, stages_for(open_store(path).manifest).plan.buffer) as extender:
        made = stages_for(extender.store.manifest)  # now that it is locked
        resolved, plan = made.resolved, made.plan
        facts = {
            "derive": _PIPELINE, "store": extender.store.manifest.fingerprint,
            "asked": asdict(derivation), "width": plan.width,
        }  # fmt: skip
        folder = path.with_name(f"{path.name}.derive")
        stages = made.stages()
        planned = RunPlan.of(stages, plan.array_bytes)
        with (
            resumable(folder, sign(facts, b""), progress, planned) as work,
            ThreadPoolExecutor(threads, thread_name_prefix="derive") as pool,
        ):
            run = DeriveRun(work, progress, extender, extender.store, pool, threads)
            run.execute(stages[:1])
            counted = run.facts(made.name("edges"))
            plan_derivation(  # may raise BudgetTooSmall
                extender.store.manifest, resolved, mem_bytes, counted["longest"]
            )
            run.execute(stages[1:])
            return DeriveResult(
                run.manifest, resolved, plan, counted["without"], run.quantization, run.results
            )


@dataclass(eq=False)
class DeriveRun(PipelineRun):
    extender: StoreExtender
    store: Store
    pool: ThreadPoolExecutor
    threads: int
    manifest: Manifest = field(init=False)  # with the new array
    quantization: QuantizationError | None = None


class DeriveStages:
    """The stages that add one array to a store."""

    def __init__(
        self, manifest: Manifest, resolved: ResolvedDerivation, plan: DerivePlan, op: str
    ) -> None:
        self._manifest, self.resolved, self.plan, self._op = manifest, resolved, plan, op
        self._feature, self._items = resolved.feature, resolved.feature.row_items
        self._one = plan.num_slices == 1  # whether sums of all columns fit in memory

    def name(self, stage: str) -> str:
        return f"{self.resolved.array.path}: {stage}"

    def stages(self) -> list[Stage[DeriveRun]]:
        resolved, block = self.resolved, self._manifest.block_bytes
        target, edges = resolved.target.num_nodes, resolved.relation.num_edges
        graph, rows = resolved.relation.num_blocks * block, row_disk_bytes(self._feature, block)
        counts = {_COUNTS: 4 * target}
        if not resolved.outward:
            counts[_BY_ORIGIN] = 4 * resolved.origin.num_nodes
        cost = Cost(graph, sum(counts.values()))
        made: list[Stage[DeriveRun]] = [Stage(self.name("edges"), cost, self._count, counts)]
        listed = graph  # bytes of all edges, by origin
        if not resolved.outward:
            item = np.dtype(resolved.origin_dtype).itemsize
            files = {_ORIGINS: item * edges, _TARGETS: resolved.widths.column_bytes * edges}
            listed = sum(files.values())
            passing = passing_bytes(edges, 8, self.plan.sort_bytes)
            cost = Cost(graph + passing, listed + passing, passing)
            made.append(Stage(self.name("sorted"), cost, self._sort, files, [_BY_ORIGIN]))
        if not self._one:
            made += self._slice_stages(rows, listed)
        copying = 0
        if resolved.copies is not None:
            copies = resolved.copies
            copying = scatter_bytes(copies.num_rows, copies.row_bytes, 4, self.plan.share)
        read = rows + listed if self._one else 4 * target * self._items
        cost = Cost(read + copying, self.plan.array_bytes + copying, copying)
        return [*made, Stage(resolved.array.path, cost, self._commit, ends=True)]

    def _slice_stages(self, rows: int, listed: int) -> list[Stage[DeriveRun]]:
        """Write each slice of columns to a file; then compute the sums of each slice."""
        plan, origins = self.plan, self.resolved.origin.num_nodes
        files = {f"x.{i}": 4 * origins * plan.width for i in range(plan.num_slices)}
        cost = Cost(rows, sum(files.values()))
        made = [Stage(self.name("columns"), cost, self._cut, files)]
        for i in range(plan.num_slices):
            size = 4 * self.resolved.target.num_nodes * plan.columns(i, self._items)
            cost = Cost(files[f"x.{i}"] + listed, size)
            body = partial(self._write_sums, i)
            made.append(Stage(self._slice(i), cost, body, {f"sums.{i}": size}, [f"x.{i}"]))
        return made

    def _slice(self, number: int) -> str:
        return self.name(f"slice {number + 1} of {self.plan.num_slices}")

    def _count(self, run: DeriveRun) -> Facts:
        """Count the neighbors of each target, and of each origin if edges must be sorted."""
        target, origin, relation, outward = self.resolved[:4]
        counts = np.zeros(target.num_nodes, np.uint32)
        by_origin = np.zeros(0 if outward else origin.num_nodes, np.uint32)
        with run.progress.stage("count edges", relation.num_edges, "edges") as stage:
            for edges in stored_edges(run.store, relation, self.plan.piece_edges):
                targets, origins = edges if not outward else edges[::-1]
                self._check(run.store, targets, target.first, target.num_nodes)
                self._check(run.store, origins, origin.first, origin.num_nodes)
                count_ids(targets, target.first, counts)
                if not outward:
                    count_ids(origins, origin.first, by_origin)
                stage.advance(targets.size)
        save_array(run.path(_COUNTS), counts)
        if not outward:
            save_array(run.path(_BY_ORIGIN), by_origin)
        without, longest = int(np.count_nonzero(counts == 0)), int(by_origin.max(initial=0))
        return {"without": without, "longest": longest}

    def _check(self, store: Store, ids: NDArray[Any], first: int, num_nodes: int) -> None:
        """Check ids, as kernels do not.  Raises CorruptBlock: an id is out of range."""
        if ids.size and not first <= int(ids.min()) <= int(ids.max()) < first + num_nodes:
            raise CorruptBlock(
                f"{store.path / self.resolved.relation.path}: ids {ids.min()} to "
                f"{ids.max()}, expected {first} to {first + num_nodes - 1}; ingest again"
            )

    def _sort(self, run: DeriveRun) -> None:
        plan, widths = self.plan, self.resolved.widths
        by_origin = load_array(run.path(_BY_ORIGIN), np.uint32)
        made = sorted_columns(
            self._records(run.store), by_origin, widths, False, plan.sort_bytes, run.folder,
            run.progress,
        )  # fmt: skip
        with (
            closing(made),
            ArrayFile(run.path(_ORIGINS), self.resolved.origin_dtype) as origins,
            ArrayFile(run.path(_TARGETS), widths.node) as targets,
        ):
            for columns in made:  # a bucket; its origins take memory that is reserved for sums
                names = np.arange(columns.first, columns.first + columns.degrees.size)
                origins.append(np.repeat(names.astype(origins.dtype), columns.degrees))
                targets.append(columns.sources)

    def _records(self, store: Store) -> Iterator[RawEdges]:
        """Edges with origins as columns, so that sorting orders them by origin."""
        target, origin, relation = self.resolved[:3]
        none = np.empty(0, np.int64)
        for targets, sources in stored_edges(store, relation, self.plan.piece_edges):
            dst, src = sources.astype(np.int64), targets.astype(np.int64)
            yield ready(Records(dst - origin.first, src - target.first, none))

    def _edges(self, run: DeriveRun) -> Edges:
        """All edges by origin: in block order, or from the sorted files."""
        target, origin, relation, outward = self.resolved[:4]
        maximum = self.plan.piece_edges
        if outward:
            for dst, src in stored_edges(run.store, relation, maximum):
                origins = dst - dst.dtype.type(origin.first)
                origins = origins.astype(self.resolved.origin_dtype, copy=False)
                yield origins, src - src.dtype.type(target.first)
            return
        with (
            ArrayFile(run.path(_ORIGINS), self.resolved.origin_dtype) as by_origin,
            ArrayFile(run.path(_TARGETS), self.resolved.widths.node) as targets,
        ):
            for first in range(0, targets.size, maximum):
                count = min(maximum, targets.size - first)
                yield by_origin.read(first, count), targets.read(first, count)

    def _cut(self, run: DeriveRun) -> None:
        plan = self.plan
        files = [run.path(f"x.{i}") for i in range(plan.num_slices)]
        cut_columns(
            run.store, self._feature, files, plan.width, plan.scan_bytes, run.progress
        )  # fmt: skip

    def _rows(self, run: DeriveRun, number: int) -> Generator[NDArray[np.float32]]:
        """Rows of the origin type in order, with the columns of a slice, or all of them."""
        plan = self.plan
        if self._one:
            return floats_ahead(run.store, self._feature, plan.scan_bytes, plan.lanes)

        def read() -> Iterator[NDArray[np.float32]]:
            with ArrayFile(run.path(f"x.{number}"), np.float32) as file:
                step = max(1, plan.scan_bytes // (4 * plan.width)) * plan.width
                for piece in file.pieces(0, file.size, step):
                    yield piece.reshape(-1, plan.width)

        return read_ahead(read())

    def _sums(self, run: DeriveRun, number: int) -> NDArray[np.float32]:
        """The new rows of all targets in one slice: float32 (targets, width)."""
        plan, first = self.plan, 0
        none: tuple[NDArray[Any], NDArray[Any]] = (np.empty(0), np.empty(0))
        counts = load_array(run.path(_COUNTS), np.uint32)
        sums = np.empty((counts.size, plan.width), np.float32)
        value = -np.inf if self._op == "max" else 0
        list(run.pool.map(lambda part: part.fill(value), np.array_split(sums, run.threads)))
        name = "add rows" if self._one else f"add rows, slice {number + 1} of {plan.num_slices}"
        with (
            run.progress.stage(name, 4 * self._feature.num_rows * plan.width, "B") as stage,
            closing(read_ahead(self._edges(run))) as edges,
            closing(self._rows(run, number)) as all_rows,
        ):
            origins, targets = next(edges, none)
            for rows in all_rows:
                stop = first + rows.shape[0]
                while origins.size and origins[0] < stop:
                    count = int(np.searchsorted(origins, origins.dtype.type(stop)))
                    self._add(run, rows, first, origins[:count], targets[:count], sums)
                    origins, targets = origins[count:], targets[count:]
                    if not origins.size:
                        origins, targets = next(edges, none)
                first = stop
                stage.advance(rows.nbytes)

        def finish(low: int) -> None:
            some, rows = counts[low : low + _STEP], sums[low : low + _STEP]
            rows[some == 0] = 0
            if self._op == "mean":
                rows /= np.maximum(some, 1).astype(np.float32)[:, None]

        list(run.pool.map(finish, range(0, counts.size, _STEP)))
        return sums

    def _add(
        self,
        run: DeriveRun,
        rows: NDArray[np.float32],
        first_row: int,
        origins: NDArray[Any],
        targets: NDArray[Any],
        sums: NDArray[np.float32],
    ) -> None:
        """Add rows; threads take different columns, so each sum is made by a single thread."""
        width = sums.shape[1]

        def kernel(low: int, high: int) -> None:
            greatest = self._op == "max"
            kernels.add_rows(greatest, rows, first_row, origins, targets, low, high, sums)

        lines = -(-width // kernels.LINE_ITEMS)
        parts = max(1, min(run.threads, lines // 2))
        ends = [min(width, lines * i // parts * kernels.LINE_ITEMS) for i in range(parts + 1)]
        others = [run.pool.submit(kernel, ends[i], ends[i + 1]) for i in range(1, parts)]
        kernel(ends[0], ends[1])
        for other in others:
            other.result()

    def _write_sums(self, number: int, run: DeriveRun) -> Facts:
        sums = self._sums(run, number)[:, : self.plan.columns(number, self._items)]
        step = max(1, self.plan.piece_rows)
        with ArrayFile(run.path(f"sums.{number}"), np.float32) as file:
            for low in range(0, sums.shape[0], step):
                file.append(np.ascontiguousarray(sums[low : low + step]))
        return {"most": self._greatest(sums).tolist()}

    def _greatest(self, sums: NDArray[np.float32]) -> NDArray[np.float32]:
        """Largest magnitude of each column if int8 needs a scale, else 0.  Raises BadInput."""
        maximum = np.zeros(sums.shape[1], np.float32)
        if not self.resolved.array.scale_path:
            return maximum
        for low in range(0, sums.shape[0], self.plan.piece_rows):
            piece = sums[low : low + self.plan.piece_rows]
            np.maximum(maximum, np.maximum(piece.max(0), -piece.min(0)), out=maximum)
            if not np.isfinite(maximum).all():
                row, column = np.argwhere(~np.isfinite(piece))[0].tolist()
                raise BadInput.at(
                    f"{self.resolved.array.path}[{low + row}]", piece[row, column],
                    "finite numbers for int8", "--dtype float16 or float32 holds it",
                )  # fmt: skip
        return maximum

    def _commit(self, run: DeriveRun) -> None:
        """Write the array and its copies, and publish them in the store."""
        plan, target, step = self.plan, self.resolved.target.num_nodes, self.plan.piece_rows
        if self._one:
            sums = self._sums(run, 0)
            maximum = self._greatest(sums)
            pieces = (sums[low : low + step] for low in range(0, target, step))
            self._write(run, pieces, maximum)
            del sums, pieces
        else:
            numbers = range(plan.num_slices)
            maximum = np.concatenate([run.facts(self._slice(i))["most"] for i in numbers])
            parts = [(run.path(f"sums.{i}"), plan.columns(i, self._items)) for i in numbers]
            joined = joined_columns(parts, np.float32, 0, target, step)
            self._write(run, joined, maximum.astype(np.float32))
        resolved = self.resolved
        if resolved.copies is not None:
            self._copy_slots(run, resolved.copies)
        run.manifest = run.extender.commit(resolved.extended(run.store.manifest))

    def _write(
        self, run: DeriveRun, pieces: Iterator[NDArray[np.float32]], maximum: NDArray[np.float32]
    ) -> None:
        """Write rows in the dtype of the array; `maximum`: as `_greatest` returns it."""
        array, done = self.resolved.array, 0
        quantizer = Quantizer(array.path, maximum / np.float32(127)) if array.scale_path else None
        if quantizer is not None:
            run.extender.side(array.scale_path, quantizer.scale)
        total = array.num_rows * array.row_bytes
        with (
            run.extender.rows(array) as writer,
            run.progress.stage("write rows", total, "B") as stage,
        ):
            for piece in pieces:
                if quantizer:
                    rows: NDArray[Any] = quantizer.rows(piece)
                else:
                    rows = checked_sums(piece, array.dtype, array.path, done)
                writer.append(rows.reshape(-1, *array.row_shape))
                done += piece.shape[0]
                stage.advance(piece.shape[0] * array.row_bytes)
        run.quantization = quantizer.report() if quantizer else None

    def _copy_slots(self, run: DeriveRun, copies: RowArray) -> None:
        """Copy rows of the new array for the halo of its type."""
        resolved, manifest = self.resolved, run.store.manifest
        halo = resolved.target.halo
        assert halo is not None
        nodes = read_rows(run.store, halo.nodes).astype(np.uint64)
        held = msgspec.structs.replace(resolved.extended(manifest), files=run.extender.digests)
        made = Store(run.extender.tree, held)
        slots = SlotCopies(made, nodes, self.plan.share, run.folder, run.progress)
        with run.extender.rows(copies) as out:
            slots.rows(resolved.array, resolved.target.first, copies, out.append)
