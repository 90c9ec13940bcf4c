"""Propagate features of a type through a relation into a store (hops of operators), out of core.

A matrix acts on each column of the features independently.  So columns are divided into slices for
which all nodes fit in memory; the graph's blocks are read once for each product and slice.  Rows to
keep go to a file for each slice and hop; these are joined at the end.  Each sum is made in the
order of the store's blocks, in float32: results do not depend on memory or threads.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.extend import StoreExtender
from blockstore.format import ITEM_BYTES, HopSet, Manifest, RowArray
from blockstore.store import numpy_dtype, open_store
from blockstore.units import format_bytes
from preprocess.errors import BadInput
from preprocess.files.array_file import save_array
from preprocess.files.store import cut_columns, joined_columns
from preprocess.hops.columns import (
    CARRIED,
    INTO,
    NODES,
    OUT,
    PLACES,
    HopsRun,
    choose_rows,
    copy_labels,
    hop_file,
)
from preprocess.hops.plan import (
    ALL,
    HopsPlan,
    Operator,
    ResolvedHops,
    gapless,
    plan_hops,
    resolve_hops,
)
from preprocess.ingest.contents import Contents, as_path
from preprocess.ingest.options import HopsRequest, IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import Ran, StageResult
from preprocess.pipeline.stage import Cost, Facts, RunPlan, Stage, resumable, temporary_bytes
from preprocess.pipeline.work import WorkFolder, sign
from preprocess.stages.product import count_degrees
from preprocess.stages.rows import scatter_bytes

DEGREES, ROWS = "hops: degrees", "hops: rows"  # names of stages
SLICES, ARRAYS = "hops: slices", "hops: arrays"
_PIPELINE = 2  # increased when stages or their files change: older work folders are not resumed


def default_threads() -> int:
    """One for each core that this process may use."""
    return min(16, len(os.sched_getaffinity(0)))


def slice_stage(number: int, operator: Operator | None, plan: HopsPlan) -> str:
    """Name of the stage that makes one slice of hop 0, or of an operator's hops."""
    name = "features" if operator is None else operator.name
    return f"hops: {name}, slice {number + 1} of {plan.num_slices}"


@dataclass(frozen=True, slots=True)
class HopsResult(Ran):
    """The hops added to a store, and the cost of the run."""

    manifest: Manifest
    resolved: ResolvedHops
    plan: HopsPlan
    rows: dict[str, int]  # number of rows of each split
    without_label: dict[str, int]  # nodes of each split that were left out
    without_edges: int  # nodes without in-edges
    array_bytes: int  # bytes of the feature arrays on disk
    stages: tuple[StageResult, ...]  # those of earlier runs included

    def text(self, path: Path) -> str:
        found, plan = self.resolved, self.plan
        names = ", ".join(operator.name for operator in found.operators)
        splits = ", ".join(f"{rows:,} {split}" for split, rows in self.rows.items())
        left = sum(self.without_label.values())
        lines = [
            f"{path}: {found.hops} hops of {names} over {found.relation.name}, "
            f"{found.feature.row_items} {found.dtype} each, fingerprint "
            f"{self.manifest.fingerprint}",
            f"rows        {splits}" + (f"; {left:,} without a label left out" if left else ""),
            f"no in-edge  {self.without_edges:,} of {found.nodes.num_nodes:,} nodes",
            f"arrays      {format_bytes(self.array_bytes)} in {found.num_arrays} arrays a split",
            f"took        {self.elapsed_s:.1f} s: {plan.num_slices} slices of {plan.width}, "
            f"{plan.num_products} products each; {plan.graph_reads} reads of the graph for them",
            f"moved       {self.moved}",
        ]
        return "\n".join(lines)


def make_hops(
    path: Path,
    request: HopsRequest,
    progress: Progress,
    mem_bytes: int = 2 << 30,
    threads: int = 0,
    fresh: bool = False,
    inside: bool = False,
) -> HopsResult:
    """Add hops to the store at `path`.

    threads   0: one a core
    fresh     begin from scratch, whatever an earlier run has left
    inside    the stages are part of another run, which displays them, and says what stays

    Raises BadInput, BudgetTooSmall, OutOfSpace, StoreBusy, StoreExists, NotAStore, CorruptBlock;
    the store is unchanged then.  If the disk fills up, or the run is stopped, finished stages stay
    beside the store, and the same call resumes after them.
    """
    path, threads = path.resolve(), threads or default_threads()
    manifest = open_store(path).manifest
    plan = plan_hops(manifest, resolve_hops(manifest, request, str(path)), mem_bytes, threads)
    with StoreExtender(path, plan.buffer) as extender:
        manifest = extender.store.manifest  # now that it is locked
        resolved = resolve_hops(manifest, request, str(path))
        plan = plan_hops(manifest, resolved, mem_bytes, threads)
        stages = HopStages(manifest, resolved, plan)
        facts = {
            "hops": _PIPELINE, "store": manifest.fingerprint, "request": asdict(request),
            "width": plan.width,
        }  # fmt: skip
        folder = path.with_name(f"{path.name}.hops")
        planned = RunPlan.of(stages.stages(), plan.array_bytes)
        if inside:
            planned.check_disk(folder)
            held: AbstractContextManager[WorkFolder] = WorkFolder(folder, sign(facts, b""), fresh)
        else:
            held = resumable(folder, sign(facts, b""), progress, planned, fresh)
        with held as work, ThreadPoolExecutor(threads, thread_name_prefix="hops") as pool:
            run = HopsRun(work, progress, extender, extender.store, resolved, plan, pool)
            run.execute(stages.stages())
            return stages.result(run)


class HopStages:
    """The stages that add hops to a store, possibly one that does not exist yet."""

    def __init__(self, manifest: Manifest, resolved: ResolvedHops, plan: HopsPlan) -> None:
        self._manifest, self.resolved, self.plan = manifest, resolved, plan
        self._label = resolved.nodes.label if resolved.is_new else None
        self._slices = [f"x.{number}" for number in range(plan.num_slices)]
        self._graph_bytes = resolved.relation.num_blocks * manifest.block_bytes

    def stages(self) -> list[Stage[HopsRun]]:
        resolved, plan, manifest = self.resolved, self.plan, self._manifest
        nodes, rows, feature = resolved.nodes.num_nodes, resolved.num_rows, resolved.feature
        ids = ITEM_BYTES[manifest.id_dtype]
        degrees = {INTO: 8 * nodes, OUT: 8 * nodes, CARRIED: resolved.relation.num_blocks}
        made: list[Stage[HopsRun]] = [
            Stage(DEGREES, Cost(self._graph_bytes, 16 * nodes), self._count, degrees),
            Stage(
                ROWS, Cost(ids * nodes + 8 * rows, (8 + ids) * rows), self._choose,
                {NODES: 8 * rows, PLACES: ids * rows},
            ),
        ]  # fmt: skip
        files = dict.fromkeys(self._slices, 4 * nodes * plan.width)
        cost = Cost(nodes * feature.row_bytes, sum(files.values()))
        made += [Stage(SLICES, cost, self._cut, files), *self._slice_stages()]
        kept = rows * feature.row_items * ITEM_BYTES[resolved.dtype]  # one hop of all columns
        read, passing = resolved.num_arrays * kept + 8 * rows, 0
        if self._label is not None:
            label, share = self._label.row_bytes, plan.copy_bytes // 4
            passing = scatter_bytes(rows, label, 4, share)
            read += len(resolved.sizes) * label * nodes + passing
        cost = Cost(read, plan.array_bytes + passing, passing)
        return [*made, Stage(ARRAYS, cost, self._commit, ends=True)]

    def _slice_stages(self) -> list[Stage[HopsRun]]:
        """Stages of hop 0 if it is missing, then of each operator's hops, slice by slice."""
        resolved, plan = self.resolved, self.plan
        nodes, rows = resolved.nodes.num_nodes, resolved.num_rows
        ids, item = ITEM_BYTES[self._manifest.id_dtype], ITEM_BYTES[resolved.dtype]
        todo = [(n, o) for n, o in enumerate(resolved.operators) if resolved.missing(o)]
        made: list[Stage[HopsRun]] = []
        for at, operator in [*([(-1, None)] if resolved.is_new else []), *todo]:
            for number in range(plan.num_slices):
                hops, read = [0], 4 * nodes * plan.width + ids * rows
                work = {}
                if operator is not None:
                    hops = list(resolved.missing(operator))
                    passes = len(operator.steps()) * resolved.hops
                    first = number == 0 and at == todo[0][0]
                    graph = (first if plan.resident else passes) * self._graph_bytes
                    read += 20 * nodes + graph + (resolved.hops - 1) * ids * rows
                    gathered = 4 * resolved.relation.num_edges * plan.width * passes
                    work = {"gathered_bytes": gathered}
                size = rows * item * plan.columns(number, resolved.feature.row_items)
                last = not todo or at == todo[-1][0]
                made.append(Stage(
                    slice_stage(number, operator, plan),
                    Cost(read, size * len(hops), 0, work),
                    partial(HopsRun.propagate, number=number, at=at, operator=operator),
                    {hop_file(at, hop, number): size for hop in hops},
                    [f"x.{number}"] if last else [],
                ))  # fmt: skip
        return made

    def _commit(self, run: HopsRun) -> None:
        """Assemble the arrays, and publish them in the store."""
        run.release()
        sets = {split: self._write(run, split) for split in run.facts(ROWS)["splits"]}
        run.manifest = run.extender.commit(self.resolved.extended(run.store.manifest, sets))

    def result(self, run: HopsRun) -> HopsResult:
        resolved, splits = self.resolved, run.facts(ROWS)["splits"]
        rows = {split: size for split, (size, _) in splits.items()}
        widths = numpy_dtype(resolved.dtype).itemsize * resolved.feature.row_items
        return HopsResult(
            run.manifest, resolved, self.plan, rows,
            {split: left for split, (_, left) in splits.items()},
            run.facts(DEGREES)["without_edges"],
            sum(rows.values()) * widths * resolved.num_arrays,
            run.results,
        )  # fmt: skip

    def _count(self, run: HopsRun) -> Facts:
        resolved = self.resolved
        weighted = any(operator.weighted for operator in resolved.operators)
        into, out, carried = count_degrees(
            run.store, resolved.relation, resolved.nodes, weighted, run.progress
        )
        save_array(run.path(INTO), into)
        save_array(run.path(OUT), out)
        save_array(run.path(CARRIED), carried)
        return {"without_edges": int(np.count_nonzero(into == 0))}

    def _choose(self, run: HopsRun) -> Facts:
        with run.progress.stage("choose rows", self.resolved.num_rows, "rows") as stage:
            splits = choose_rows(run.store, self.resolved, run.folder)
            stage.advance(self.resolved.num_rows)
        return {"splits": splits}

    def _cut(self, run: HopsRun) -> None:
        """Write features to a file for each slice, as float32.  Raises BadInput: NaN, infinity."""
        feature, plan = self.resolved.feature, self.plan
        scan = max(1, plan.piece_bytes * feature.row_bytes // (4 * feature.row_items))
        check = partial(self._check_finite, run.store.path)
        files = [run.path(name) for name in self._slices]
        cut_columns(run.store, feature, files, plan.width, scan, run.progress, check)

    def _check_finite(self, store: Path, rows: NDArray[np.float32], first: int) -> None:
        bounds = (float(rows.min(initial=0)), float(rows.max(initial=0)))
        if not np.isfinite(bounds).all():
            row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
            raise BadInput.at(
                f"{store / self.resolved.feature.path}[{first + row}, {column}]",
                f"{rows[row, column]}", "finite features, as every hop would spread it",
                "ingest without it, or choose other features by --feature",
            )  # fmt: skip

    def _write(self, run: HopsRun, split: str) -> HopSet:
        """Write all arrays of a split; returns its set, earlier hops included."""
        resolved, manifest, splits = self.resolved, run.store.manifest, run.facts(ROWS)["splits"]
        nodes, rows = resolved.nodes, splits[split][0]
        sizes = [size for size, _ in splits.values()]
        first = sum(sizes[: list(splits).index(split)])
        held = nodes.hops.get(split)
        if held is None:
            ids = gapless(manifest, f"{resolved.folder(split)}/nodes", "int64", rows, ())
            self._assemble(run, ids, first, [(NODES, 1)], np.int64)
            label = None
            if nodes.label is not None:
                label = gapless(
                    manifest, f"{resolved.folder(split)}/label", nodes.label.dtype, rows,
                    nodes.label.row_shape,
                )  # fmt: skip
                with run.extender.rows(label) as out:
                    copy_labels(
                        run, run.store, nodes, label, first, self.plan.copy_bytes, out.append
                    )
            zero = resolved.array(manifest, split, rows, "0")
            self._assemble_hop(run, zero, first, -1, 0)
            held = HopSet(split, ids, label, {}, resolved.feature_name, resolved.seed)
        else:
            zero = next(iter(held.operators.values()))[0]
        operators = dict(held.operators)
        for number, operator in enumerate(resolved.operators):
            chain = list(operators.get(operator.name, (zero,)))
            for hop in resolved.missing(operator):
                tail = f"{as_path(operator.name)}/{hop}"
                array = resolved.array(manifest, split, rows, tail)
                self._assemble_hop(run, array, first, number, hop)
                chain.append(array)
            operators[operator.name] = tuple(chain)
        return msgspec.structs.replace(held, operators=operators)

    def _assemble_hop(self, run: HopsRun, array: RowArray, first: int, at: int, hop: int) -> None:
        plan, columns = self.plan, array.row_items
        parts = [(hop_file(at, hop, i), plan.columns(i, columns)) for i in range(plan.num_slices)]
        if array.scale_path:
            operator = None if at < 0 else self.resolved.operators[at]
            scale = [
                value for i, (name, _) in enumerate(parts)
                for value in run.facts(slice_stage(i, operator, plan))["scales"][name]
            ]  # fmt: skip
            run.extender.side(array.scale_path, np.array(scale, np.float32))
        self._assemble(run, array, first, parts, numpy_dtype(array.dtype))

    def _assemble(
        self, run: HopsRun, array: RowArray, first: int, parts: list[tuple[str, int]], dtype: Any
    ) -> None:
        """Write an array from files that hold some of its columns; `parts`: (file, columns)."""
        step = max(1, self.plan.buffer // array.row_bytes)
        files = [(run.path(name), width) for name, width in parts]
        with (
            run.progress.stage(array.path, array.num_rows * array.row_bytes, "B") as stage,
            run.extender.rows(array) as writer,
        ):
            for rows in joined_columns(files, dtype, first, array.num_rows, step):
                writer.append(rows)
                stage.advance(rows.nbytes)


# -- hops of a store that an ingest will make -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class HopsEstimate:
    """The estimated cost of an ingest's hops."""

    operators: tuple[str, ...]
    hops: int
    node_type: str
    rows: Mapping[str, int]  # maximum number of rows of each split
    plan: HopsPlan
    temporary_bytes: int


def estimate_hops(
    manifest: Manifest, options: IngestOptions, where: str
) -> tuple[HopsEstimate, list[Stage[HopsRun]]]:
    """The estimate of the requested hops, and their stages.  Raises BadInput, BudgetTooSmall.

    manifest   that of the future store, with upper bounds of edges and labelled nodes
    """
    request = options.hops
    assert request is not None
    if options.allow_nan:
        raise BadInput.at(
            "--hops", "--allow-nan beside it", "finite features, as every hop would spread others",
            "leave one of them out",
        )  # fmt: skip
    try:
        resolved = resolve_hops(manifest, request, where)
    except BadInput as error:
        raise BadInput(f"hops: {error}") from error
    plan = plan_hops(manifest, resolved, options.mem_bytes, default_threads())
    stages = HopStages(manifest, resolved, plan).stages()
    found = HopsEstimate(
        tuple(operator.name for operator in resolved.operators), resolved.hops,
        resolved.nodes.name, resolved.sizes, plan, temporary_bytes(stages),
    )  # fmt: skip
    return found, stages


def without_splits(contents: Contents, options: IngestOptions) -> IngestOptions:
    """For a source whose splits are not known yet: plan hops as if a split had all nodes."""
    asked = options.hops
    if asked is None or asked.rows == ALL or any(t.splits for t in contents.types):
        return options
    return replace(options, hops=replace(asked, rows="all", splits=()))
