"""Estimate the cost of an ingest without running it, as text and for scripts."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockstore.units import format_bytes
from preprocess.hops.hops import HopsEstimate, without_splits
from preprocess.ingest.contents import check_left_out, list_contents
from preprocess.ingest.ingest import IngestStages
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.disk import DiskRates, existing_folder, measure_disk
from preprocess.pipeline.renderings import format_count, format_seconds
from preprocess.pipeline.result import IngestPlan, StagePlan
from preprocess.pipeline.stage import Stage
from preprocess.sources.source import Source

START_S = 1.0  # to start the interpreter, and load compiled kernels


@dataclass(frozen=True, slots=True)
class ProcessorRates:
    """Rates of four cores on the machine of docs/results: assumed, not measured here."""

    counted_edges: float = 60e6  # edges a second, of one pass
    sorted_edges: float = 25e6  # put into buckets, and sorted
    ordered_edges: float = 60e6  # breadth-first, given the columns
    packed_edges: float = 60e6  # packed into blocks
    moved_bytes: float = 1.7e9  # bytes a second of rows, read and written
    partitioned_edges: float = 30e6  # in one pass of a partitioner, on one core
    gathered_bytes: float = 15e9  # of rows of neighbors, added up
    walked_edges: float = 60e6  # in one step of walks, a cache line of lanes on each core


@dataclass(frozen=True, slots=True)
class StageEstimate(StagePlan):
    disk_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        """The larger of both, as disk and processors work at the same time."""
        return max(self.disk_s, self.processor_s)

    @property
    def bound(self) -> str:
        return "disk" if self.disk_s >= self.processor_s else "CPU"


def estimate_stages(
    stages: Sequence[Stage[Any]], disk: DiskRates, processor: ProcessorRates
) -> tuple[StageEstimate, ...]:
    """Estimate the time of each stage, by its disk traffic and by its work."""
    found = []
    for s in stages:
        read, written = s.cost.read, s.cost.written
        work = s.cost.work or {"moved_bytes": read + written}
        processor_s = sum(count / getattr(processor, rate) for rate, count in work.items())
        disk_s = read / disk.read + written / disk.write
        found.append(StageEstimate(s.name, read, written, disk_s, processor_s))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class DryRun:
    """Everything that is known or estimated before an ingest."""

    source: str
    layout: str
    source_bytes: int
    num_files: int
    may_shrink: bool  # whether counts are upper bounds, as the source has not been prepared
    plan: IngestPlan
    free_bytes: int  # where the store will lie
    fits_disk: bool
    disk: DiskRates
    processor: ProcessorRates
    stages: tuple[StageEstimate, ...]
    elapsed_s: float  # estimated
    hops: HopsEstimate | None = None


def dry_run(
    source: Source,
    target: Path,
    options: IngestOptions,
    may_shrink: bool = False,
    spread: bool = False,
) -> DryRun:
    """Read headers, and measure the disk briefly.  Raises BadInput, BudgetTooSmall, OSError."""
    options.check()
    source = source.with_reverses(options.undirected)
    contents = list_contents(source, options)
    if not may_shrink:
        check_left_out(source, options)
    else:
        options = without_splits(contents, options)
    made = IngestStages(source, contents, options, spread)
    plan = made.plan()
    folder = existing_folder(target)
    free = shutil.disk_usage(folder).free
    disk, processor = measure_disk(folder), ProcessorRates()
    stages = estimate_stages(made.all_stages(), disk, processor)
    return DryRun(
        source=source.where,
        layout=source.layout,
        source_bytes=source_bytes(source.files),
        num_files=len(source.files),
        may_shrink=may_shrink,
        plan=plan,
        free_bytes=free,
        fits_disk=plan.store_bytes + plan.temporary_bytes <= free,
        disk=disk,
        processor=processor,
        stages=stages,
        elapsed_s=START_S + sum(s.seconds for s in stages),
        hops=made.hops,
    )


def source_bytes(files: Sequence[Path]) -> int:
    """Bytes on disk of the files that exist."""
    return sum(path.stat().st_size for path in files if path.is_file())


def dry_run_text(found: DryRun) -> str:
    maximum = " at most" if found.may_shrink else ""
    files = "file" if found.num_files == 1 else "files"
    lines = [
        f"source      {found.source}: {found.layout}, {format_bytes(found.source_bytes)} in "
        f"{found.num_files} {files}",
        *_counts(found, maximum),
        *_disk(found),
        *_memory(found.plan),
        *_hops(found.hops),
        *_stages(found),
    ]
    return "\n".join(lines)


def _counts(found: DryRun, maximum: str) -> list[str]:
    plan = found.plan
    width = max([len(name) for name in (*plan.num_nodes, *plan.num_edges)])
    rows = [(name, count, maximum) for name, count in plan.num_nodes.items()]
    lines = _block("nodes", [f"{name:<{width}}  {n:>15,}{tail}" for name, n, tail in rows])
    edges = [f"{name:<{width}}  {n:>15,} at most" for name, n in plan.num_edges.items()]
    return lines + _block("edges", edges)


def _disk(found: DryRun) -> list[str]:
    plan, whole = found.plan, found.plan.store_bytes + found.plan.temporary_bytes
    verdict = "it fits" if found.fits_disk else "IT DOES NOT FIT: free some, or choose another disk"
    rows = [
        ("store, at most", plan.store_bytes, ""),
        ("temporary files, at most", plan.temporary_bytes, "gone when it is done"),
        ("both", whole, f"of {format_bytes(found.free_bytes)} free: {verdict}"),
    ]
    return _block(
        "disk", [f"{name:<40}  {format_bytes(n):>8}  {t}".rstrip() for name, n, t in rows]
    )


def _memory(plan: IngestPlan) -> list[str]:
    rows = [*((line.what, line.bytes) for line in plan.memory), ("--mem", plan.mem_bytes)]
    return _block("memory", [f"{what:<40}  {format_bytes(n):>8}" for what, n in rows])


def _hops(found: HopsEstimate | None) -> list[str]:
    if found is None:
        return []
    rows = ", ".join(f"{count:,} {split}" for split, count in found.rows.items())
    plan, read = found.plan, "held in memory" if found.plan.resident else "read for each product"
    lines = [
        f"{found.hops} of {', '.join(found.operators)}, of {found.node_type}: at most {rows} rows",
        f"{plan.num_slices} slices of {plan.width} columns, {plan.num_products} products each, the "
        f"graph {read}; arrays of {format_bytes(plan.array_bytes)}",
    ]
    return _block("hops", lines)


def _stages(found: DryRun) -> list[str]:
    disk, rates = found.disk, found.processor
    read = sum(s.read_bytes for s in found.stages)
    written = sum(s.written_bytes for s in found.stages)
    width = max(40, *(len(s.name) for s in found.stages))
    lines = [f"{'':<{width}}  {'read':>8}  {'written':>8}  {'time':>8}  bound by"]
    lines += [
        f"{s.name:<{width}}  {format_bytes(s.read_bytes):>8}  {format_bytes(s.written_bytes):>8}  "
        f"{format_seconds(s.seconds):>8}  {s.bound}"
        for s in found.stages
    ]
    lines.append(
        f"{'all':<{width}}  {format_bytes(read):>8}  {format_bytes(written):>8}  "
        f"{format_seconds(found.elapsed_s):>8}"
    )
    cached = "" if disk.direct else ", perhaps of its cache"
    lines += [
        f"disk: {_per_s(disk.read)} read, {_per_s(disk.write)} written, measured in "
        f"{disk.folder} for {disk.elapsed_s:.1f} s{cached}",
        f"CPU, assumed: {format_count(rates.counted_edges)} edges/s counted, "
        f"{format_count(rates.sorted_edges)} sorted, {format_count(rates.ordered_edges)} ordered, "
        f"{format_count(rates.packed_edges)} packed; rows {_per_s(rates.moved_bytes)}",
    ]
    return _block("passes", lines)


def _block(head: str, lines: list[str]) -> list[str]:
    return [f"{head if i == 0 else '':<12}{line}" for i, line in enumerate(lines)]


def _per_s(rate: float) -> str:
    return f"{format_bytes(int(rate))}/s"
