"""Ingest a source into a store: stages in order, within one memory budget, all or nothing.

Each finished stage is recorded in the work folder: after a kill the same command resumes after the
last recorded one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall, NotAStore
from blockstore.extend import StoreExtender
from blockstore.format import FORMAT_VERSION, Manifest, Partitioning
from blockstore.store import open_store
from blockstore.writer import StoreWriter
from preprocess.errors import BadInput
from preprocess.files.buckets import passing_bytes
from preprocess.hops.columns import HopsRun
from preprocess.hops.hops import HopsEstimate, estimate_hops, make_hops
from preprocess.ingest.contents import Contents, TypeContents, check_left_out, list_contents
from preprocess.ingest.graph import PARTITION, RANK, IngestRun, IngestStage, counts_file
from preprocess.ingest.nodes import TypeStages, quantization_errors
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.plan import (
    CHECK,
    COLUMNS_STAGE,
    COUNT,
    ORDER,
    PARTITION_STAGE,
    IngestJob,
    check_longest,
    looks_at_label,
    memory_lines,
    plan_memory,
    store_bytes,
)
from preprocess.ingest.prepare import preparation_of, prepared
from preprocess.ingest.relations import RelationStages
from preprocess.partition.influence_plan import copies_nodes
from preprocess.partition.influence_stages import InfluenceStages
from preprocess.partition.metis import check_installed
from preprocess.partition.partition import PartitionOptions, visited_fits
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import IngestPlan, IngestResult, StageResult
from preprocess.pipeline.stage import Cost, Facts, RunPlan, Stage, resumable, temporary_bytes
from preprocess.pipeline.tasks import Executor
from preprocess.pipeline.work import STORE, check_free, sign
from preprocess.sources.source import Source
from preprocess.sources.sourcefiles import SourceFiles
from preprocess.stages.columns import COLUMNS, DEGREES
from preprocess.stages.labels import NodeClasses, source_classes
from preprocess.stages.scan import check_edge_splits

_PARTITIONING = "partitioning"  # in the facts of a stage
_PIPELINE = 4  # increased when stages or their files change: older work folders are not resumed


def ingest(
    source: Source,
    target: Path,
    options: IngestOptions,
    progress: Progress,
    fresh: bool = False,
    files: SourceFiles | None = None,
    executor: Executor | None = None,
) -> IngestResult:
    """Write the store.

    fresh     begin from scratch, whatever an earlier run has left
    files     state of the source's files when it was opened; None: their state now
    executor  runs tasks that sort edges and place rows, each within the memory of the options; the
              store is the same with or without

    Raises BadInput (also if a file changes meanwhile), StoreExists, BudgetTooSmall, StoreBusy and,
    if there is too little disk space from the start, OutOfSpace; nothing is left behind then.  If
    the disk fills up later, or the run is stopped, finished stages stay, and the same call resumes
    after them.
    """
    check_free(target, target, preparation_of(target))
    files = files or SourceFiles(source.files)
    with prepared(source, target, options.mem_bytes, progress, fresh, files):
        options.check()
        source = source.with_reverses(options.undirected)
        check_left_out(source, options)
        stages = IngestStages(source, list_contents(source, options), options, executor is not None)
        facts = _sign_facts(source, options)
        return write_store(stages, target, files, progress, facts, fresh, executor)


def write_store(
    stages: "IngestStages",
    target: Path,
    files: SourceFiles,
    progress: Progress,
    signed: Facts,
    fresh: bool,
    executor: Executor | None = None,
) -> IngestResult:
    """Run the stages in a work folder beside the target.

    files    state of the source's files when it was opened
    signed   everything that decides the store's bytes, except the files

    Raises what `ingest` does.
    """
    job = stages.job
    if job.options.partition is not None:
        check_installed(job.options.partition.method)
    planned = stages.plan()
    facts = {
        "source": job.source.where, "layout": job.source.layout, "store": str(target),
        "plan": msgspec.to_builtins(planned),
    }  # fmt: skip
    plan = RunPlan(planned.stages, planned.store_bytes, planned.temporary_bytes, facts)
    with (
        resumable(target, sign(signed, files.digest()), progress, plan, fresh) as work,
        files.unchanged(),
        StoreWriter(
            work.path / STORE,
            block_bytes=job.options.block_bytes,
            buffer_bytes=job.buffer,
        ) as writer,
    ):
        run = IngestRun(work, progress, writer, job, executor)
        run.execute(stages.first_stages())
        stages.decide(run)
        run.execute(stages.later_stages())
        manifest = stages.manifest(run)
        files.check()  # nothing reads the source from here on
        errors, results = quantization_errors(run), run.results
        if job.options.hops is None:
            manifest = writer.settle(manifest)
        else:
            manifest, added = _hops(run, manifest, job.options, target)
            results += added
        run.appear(target)
        return IngestResult(manifest, results, errors)


def _hops(
    run: IngestRun, manifest: Manifest, options: IngestOptions, target: Path
) -> tuple[Manifest, tuple[StageResult, ...]]:
    """Add propagated features to the new store, unless an earlier run has added them.

    Raises BadInput: they cannot be computed; the store is then published without them.
    """
    assert options.hops is not None
    run.forget_order()
    with suppress(NotAStore):
        held = open_store(run.result).manifest
        if any(t.hops for t in held.types):
            with StoreExtender(run.result):  # removes the leftovers of that run
                return held, ()
    run.writer.settle(manifest)
    try:
        found = make_hops(run.result, options.hops, run.progress, options.mem_bytes, inside=True)
    except BadInput as error:
        run.appear(target)
        raise BadInput(f"{error}; {target} is there, without hops") from error
    return found.manifest, found.stages


class IngestStages:
    """All stages of an ingest, and the manifest of what they made."""

    def __init__(
        self, source: Source, contents: Contents, options: IngestOptions, spread: bool = False
    ) -> None:
        """Divide the memory budget.

        spread   whether an executor will run tasks for the stages that support it

        Raises BadInput; BudgetTooSmall with the minimum for both the ingest and its hops.
        """
        self.job = IngestJob(source, contents, options, 0, 0)
        self.hops: HopsEstimate | None = None
        self._hop_stages: list[Stage[HopsRun]] = []
        refused: list[BudgetTooSmall] = []
        try:
            buffer, share = plan_memory(contents, options)
            fit = contents.columns_fit(share)
            self.job = IngestJob(source, contents, options, buffer, share, fit, spread)
        except BudgetTooSmall as error:
            refused.append(error)
        try:
            if options.hops is not None:
                manifest = self._bare_manifest(None)
                self.hops, self._hop_stages = estimate_hops(manifest, options, source.where)
        except BudgetTooSmall as error:
            refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.min_bytes)
        self._influence: InfluenceStages | None = None
        if copies_nodes(self.job.options):
            self._influence = InfluenceStages(self.job, self._bare_manifest)

    def stages(self) -> list[IngestStage]:
        return [*self.first_stages(), *self.later_stages()]

    def later_stages(self) -> list[IngestStage]:
        """Stages that depend on the results of the first ones."""
        found = self._order_stages()
        for relation in self._relations():
            found += relation.stages()
        for node_type in self._types():
            found += node_type.stages()
        return [*found, *(self._influence.stages() if self._influence else ())]

    def _relations(self) -> list[RelationStages]:
        return [RelationStages(self.job, i) for i in range(len(self.job.contents.relations))]

    def _types(self) -> Sequence[TypeStages]:
        return [TypeStages(self.job, i) for i in range(len(self.job.contents.types))]

    def all_stages(self) -> list[Stage[Any]]:
        """All stages, those of propagated features included."""
        return [*self.stages(), *self._hop_stages]

    def plan(self) -> IngestPlan:
        contents, options, hops = self.job.contents, self.job.options, self.hops
        store, temporary = store_bytes(contents, options), temporary_bytes(self.stages())
        if hops is not None:
            added = hops.plan.array_bytes
            store, temporary = store + added, max(temporary - added, hops.temporary_bytes)
        return IngestPlan(
            num_nodes={t.name: t.num_nodes for t in contents.types},
            num_edges={
                f"{r.source.src}-{r.source.name}-{r.source.dst}": r.max_edges
                for r in contents.relations
            },
            store_bytes=store,
            temporary_bytes=temporary,
            mem_bytes=options.mem_bytes,
            memory=memory_lines(self.job),
            stages=tuple(s.plan for s in self.all_stages()),
        )

    def first_stages(self) -> list[IngestStage]:
        """Stages whose results decide what the later ones do."""
        contents, types = self.job.contents, self._types()
        bits = {t.bits_file: -(-t.type.num_nodes // 8) for t in types if t.splits_seeded}
        counts = {counts_file(i): 4 * r.dst.num_nodes for i, r in enumerate(contents.relations)}
        work = {"counted_edges": sum(r.source.num_edges for r in contents.relations)}
        cost = Cost(self.job.source_bytes, sum(counts.values()), 0, work)
        return [
            IngestStage(CHECK, Cost(self._checked_bytes()), self._check, bits),
            IngestStage(COUNT, cost, lambda run: {"longest": run.count()}, counts),
        ]

    def decide(self, run: IngestRun) -> None:
        """After the first stages: decide whether columns stay in memory or go to disk.

        Raises BudgetTooSmall: sorting the longest column takes too much memory.
        """
        job, longest = self.job, run.facts(COUNT)["longest"]
        check_longest(job, longest)
        if job.options.needs_columns:
            fit = run.work.find(ORDER) is not None or run.fits(longest)
            self.job = replace(job, columns_fit=fit and run.work.find(COLUMNS_STAGE) is None)

    def _checked_bytes(self) -> int:
        read, options = 0, self.job.options
        for t in self.job.contents.types:
            read += sum(s.source.num_bytes for s in t.splits)
            if t.label and looks_at_label(t.label, options):
                read += t.label.source.num_bytes
        return read + sum(s.source.num_bytes for r in self.job.contents.relations for s in r.splits)

    def _check(self, run: IngestRun) -> Facts:
        labels = {t.type.name: t.check(run) for t in self._types()}
        for r in self.job.contents.relations:
            check_edge_splits(self.job.source, r.source, self.job.options.leave_out)
        return {"labels": {name: facts for name, facts in labels.items() if facts is not None}}

    def _order_stages(self) -> list[IngestStage]:
        """Columns by source id, a partition of the nodes, their order: only the stages needed."""
        job, options = self.job, self.job.options
        if not options.renames:
            return []
        rank, edges = 4 * job.contents.num_nodes, job.num_edges
        if not options.needs_columns:
            return [IngestStage(ORDER, Cost(0, rank), self._order, {RANK: rank})]
        work: dict[str, float] = {"sorted_edges": edges} if job.columns_fit else {}
        item = job.contents.column_item_bytes if job.columns_fit else 4
        held = item * edges if job.columns_fit else 0
        passing = job.sort_bytes(edges, 4 + item, job.share - held)
        spent = [] if job.contents.reads_columns else [COLUMNS, DEGREES]
        stages, sorting, columns = [], Cost(job.source_bytes + passing, passing, passing, work), 0
        if not job.columns_fit:
            columns = 4 * edges + rank
            cost = Cost(sorting.read, columns + passing, passing, {"sorted_edges": edges})
            files = {COLUMNS: 4 * edges, DEGREES: rank}
            sort = partial(IngestRun.columns, in_memory=False)
            stages = [IngestStage(COLUMNS_STAGE, cost, sort, files)]
            sorting = Cost(columns)
        if options.partition is not None:
            cost = self._partition_cost(sorting, options.partition, held, columns)
            stages.append(
                IngestStage(PARTITION_STAGE, cost, self._find_partition, {PARTITION: rank})
            )
            sorting, spent = Cost(columns + rank), [*spent, PARTITION]
        work = {**sorting.work, "ordered_edges": edges}
        cost = Cost(sorting.read, sorting.written + rank, sorting.passing, work)
        return [*stages, IngestStage(ORDER, cost, self._order, {RANK: rank}, spent)]

    def _partition_cost(
        self, sorting: Cost, settings: PartitionOptions, held: int, columns: int
    ) -> Cost:
        """`sorting`: cost of making columns; `held`: their bytes in memory, `columns`: on disk."""
        job, total, visited, visiting = self.job, self.job.num_edges, 0, 0
        passes, work = 1, dict(sorting.work)
        if settings.is_streamed:
            # a pass reads each edge in both directions, unless in-edges suffice
            maximum = total if job.options.undirected or settings.neighbors == "in" else 2 * total
            visited = 0 if visited_fits(maximum, job.share - held, held > 0) else 4 * maximum
            visiting, passes = passing_bytes(maximum, 8, job.share - held), settings.passes + 1
            work["sorted_edges"] = work.get("sorted_edges", 0) + total
        work["partitioned_edges"] = passes * total
        types = job.contents.types
        labels = 2 * sum(t.label.source.num_bytes for t in types if t.label)
        read = sorting.read + labels + visiting + (settings.passes + 1) * visited + columns
        passing = max(sorting.passing, visiting + visited)
        written = sorting.written + visiting + visited + 4 * job.contents.num_nodes
        return Cost(read, written, passing, work)

    def _hold_columns(self, run: IngestRun) -> None:
        """Sort the columns into memory, if they stay there and are not there yet."""
        if self.job.options.needs_columns and self.job.columns_fit:
            run.columns(in_memory=True)

    def _find_partition(self, run: IngestRun) -> Facts:
        self._hold_columns(run)
        report = run.partition(self._classes(run))
        return {_PARTITIONING: msgspec.to_builtins(report)}

    def _order(self, run: IngestRun) -> Facts:
        self._hold_columns(run)
        return {"starts": run.order()}

    def _partitioning(self, run: IngestRun) -> Partitioning | None:
        if self.job.options.partition is None:
            return None
        return msgspec.convert(run.facts(PARTITION_STAGE)[_PARTITIONING], Partitioning)

    def _classes(self, run: IngestRun) -> NodeClasses:
        """Classes of the nodes; training nodes are those of the source's split or a seeded one."""
        job, labels = self.job, run.facts(CHECK)["labels"]
        made = {stages.type.name: stages for stages in self._types()}

        def seeded(t: TypeContents) -> Callable[[], Iterator[NDArray[np.int64]]] | None:
            stages = made[t.name]
            return partial(stages.seeded, 0, run) if stages.splits_seeded else None

        dtypes = {name: facts["dtype"] for name, facts in labels.items()}
        return source_classes(job.source, job.contents, dtypes, job.share, seeded)

    def manifest(self, run: IngestRun) -> Manifest:
        """The manifest of the store, without its fingerprint; call it after all stages."""
        return self._influence.extended(run) if self._influence else self._bare_manifest(run)

    def _bare_manifest(self, run: IngestRun | None) -> Manifest:
        """The manifest without hubs and halos; before a run, with upper bounds of all counts."""
        options = self.job.options
        return Manifest(
            format=FORMAT_VERSION,
            block_bytes=options.block_bytes,
            id_dtype=self.job.contents.id_dtype,
            types=tuple(t.node_type(run) for t in self._types()),
            relations=tuple(r.relation(run) for r in self._relations()),
            order=options.order,
            undirected=options.undirected,
            duplicates="drop" if options.drop_equal else "keep",
            self_loops=options.self_loops,
            partitioning=self._partitioning(run) if run else None,
        )


def _sign_facts(source: Source, options: IngestOptions) -> Facts:
    """Everything that decides the store's bytes, except the files."""
    return {
        "layout": source.layout,
        "num_nodes": dict(source.num_nodes),
        "relations": [list(r[:4]) for r in source.relations],
        **option_facts(options),
    }


def option_facts(options: IngestOptions) -> Facts:
    """The part of the signature that depends on the pipeline's version and the options."""
    return {
        "pipeline": [_PIPELINE, FORMAT_VERSION],
        "options": {k: v for k, v in asdict(options).items() if k != "mem_bytes"},
    }
