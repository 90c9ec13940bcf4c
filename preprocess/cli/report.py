"""The summary of an ingest, for a person and for a script."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blockstore.format import HopSet, Manifest, Partitioning
from blockstore.store import open_store
from blockstore.units import format_bytes
from preprocess.cli.dryrun import source_bytes
from preprocess.cli.info import hops_text
from preprocess.cli.summary import Bin, Degrees, Labels, StoreSummary, TypeSummary, summarise
from preprocess.partition.report import partition_lines
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import format_seconds
from preprocess.pipeline.result import IngestResult, QuantizationError, StageResult
from preprocess.sources.source import Source

_BAR = 30  # characters


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """What an ingest has made, and what it took."""

    graph: StoreSummary
    source_bytes: int
    store_bytes: int
    elapsed_s: float  # of all stages, those of earlier runs too
    peak_bytes: int  # of memory, in this run
    stages: tuple[StageResult, ...]
    quantization: tuple[QuantizationError, ...]
    partitioning: Partitioning | None = None
    hops: dict[str, HopSet] = field(default_factory=dict)  # by split


def summarise_ingest(
    source: Source, target: Path, result: IngestResult, progress: Progress
) -> IngestSummary:
    """Read the graph of a store that has just been made.  Raises CorruptBlock."""
    return IngestSummary(
        graph=summarise(open_store(target), progress),
        source_bytes=source_bytes(source.files),
        store_bytes=sum(p.stat().st_size for p in target.rglob("*") if p.is_file()),
        elapsed_s=sum(s.elapsed_s for s in result.stages),
        peak_bytes=progress.peak_bytes,
        stages=result.stages,
        quantization=result.quantization,
        partitioning=result.manifest.partitioning,
        hops={s: found for t in result.manifest.types for s, found in t.hops.items()},
    )


def made_line(target: Path, manifest: Manifest) -> str:
    edges = sum(r.num_edges for r in manifest.relations)
    return (
        f"{target}: {manifest.num_nodes:,} nodes, {edges:,} edges, fingerprint "
        f"{manifest.fingerprint}"
    )


def advice_lines(manifest: Manifest) -> list[str]:
    """What training on the store would lack, and the option of ingest that gives it."""
    lines, reached = [], {r.dst for r in manifest.relations}
    lonely = [t.name for t in manifest.types if t.name not in reached and (t.label or t.splits)]
    if lonely and manifest.relations:  # nothing can be sampled
        lines.append(
            f"no relation leads to {', '.join(lonely)}: sampled neighborhoods of its nodes are "
            "empty; to add the reverse of each relation, ingest with --undirected"
        )
    for r in manifest.relations:
        listed = [name for name, rows in r.splits.items() if not rows.row_shape]
        if listed and r.edge_id_dtype is None:
            lines.append(
                f"splits of {r.src}-{r.name}-{r.dst} list positions of edges ({', '.join(listed)}),"
                " and the store has none to find them by; to keep them, ingest with --edge-ids"
            )
    return lines


def summary_text(found: IngestSummary) -> str:
    resumed = sum(s.elapsed_s for s in found.stages if s.resumed)
    earlier = f", {format_seconds(resumed)} of it in an earlier run" if resumed else ""
    ratio = found.store_bytes / max(1, found.source_bytes)
    lines = [
        graph_text(found.graph),
        f"size        {format_bytes(found.source_bytes)} became "
        f"{format_bytes(found.store_bytes)}: {ratio:.2f} times as much",
        f"took        {format_seconds(found.elapsed_s)}{earlier}, at most "
        f"{format_bytes(found.peak_bytes)} of memory",
    ]
    if found.partitioning is not None:
        first, *rest = partition_lines(found.partitioning)
        lines += [f"partitions  {first}", *(f"            {line}" for line in rest)]
    for split, held in found.hops.items():
        lines.append(f"hops        {split}: {hops_text(held)}")
    for error in found.quantization:
        lines.append(
            f"int8        {error.path}: off by {error.largest:.3g} at most, {error.rms:.3g} rms"
        )
    return "\n".join(lines)


def graph_text(found: StoreSummary) -> str:
    """The part that a store says by itself."""
    lines: list[str] = []
    for t in found.types:
        lines += _type_lines(t)
    for r in found.relations:
        listed = r.num_source_edges
        tail = "" if listed == r.num_edges else f", {listed:,} in the source"
        lines.append(f"edges       {r.name}: {r.num_edges:,}{tail}")
        lines += _split_lines(r.splits, listed)
        lines += _degree_lines(r.degrees)
    return "\n".join(lines)


def _type_lines(t: TypeSummary) -> list[str]:
    lines = [
        f"nodes       {t.name}: {t.num_nodes:,}, {_share(t.num_isolated, t.num_nodes)} isolated"
    ]
    if t.labels is not None:
        lines += [f"              {line}" for line in _label_lines(t, t.labels)]
    lines += _split_lines(t.splits, t.num_nodes)
    if t.labels is not None and not t.splits:
        lines.append("              splits: none; ingest --split 0.6,0.2,0.2 makes some")
    return lines


def _split_lines(splits: Mapping[str, int], total: int) -> list[str]:
    parts = ", ".join(f"{name} {_share(count, total)}" for name, count in splits.items())
    return [f"              splits: {parts}"] if parts else []


def _share(count: int, total: int) -> str:
    return f"{count:,} ({_percent(count, total)})" if count else "none"


def _percent(count: int, total: int) -> str:
    share = 100 * count / max(1, total)
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.2g} %"


def _label_lines(t: TypeSummary, labels: Labels) -> list[str]:
    missing = t.num_nodes - labels.num_labelled
    tail = f"; {_share(missing, t.num_nodes)} unlabelled"
    if labels.kind == "numbers":
        if not labels.num_labelled:
            return [f"labels: numbers{tail}"]
        return [
            f"labels: numbers, {labels.least:.4g} to {labels.greatest:.4g}, mean "
            f"{labels.mean:.4g}{tail}"
        ]
    what = "classes" if labels.kind == "classes" else "columns"
    total = labels.num_labelled
    top = ", ".join(f"{c.label}: {_percent(c.num_nodes, total)}" for c in labels.top)
    more = ", ..." if labels.num_classes > len(labels.top) else ""
    return [f"labels: {labels.num_classes:,} {what}{tail}", f"  most often {top}{more}"]


def _degree_lines(degrees: Degrees) -> list[str]:
    lines = [
        f"              in-degree: min {degrees.min:,}, median {degrees.median:,}, mean "
        f"{degrees.mean:.1f}, p99 {degrees.p99:,}, max {degrees.max:,}"
    ]
    most = max([b.num_nodes for b in degrees.histogram], default=0)
    names = [_bin_name(b) for b in degrees.histogram]
    width = max([len(name) for name in names], default=0)
    for name, b in zip(names, degrees.histogram, strict=True):
        bar = "█" * -(-b.num_nodes * _BAR // most)
        lines.append(f"              {name:>{width}}  {b.num_nodes:>13,}  {bar}".rstrip())
    return lines


def _bin_name(b: Bin) -> str:
    return f"{b.low:,}" if b.low == b.high else f"{b.low:,}-{b.high:,}"
