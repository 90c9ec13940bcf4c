"""Statistics of a store's graph, found in one pass: degrees, isolated nodes, labels, splits.

Memory: a byte a node, a number for each degree that occurs, and buffers of a few MiB.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import HopSet, Manifest, NodeType, Partitioning, Relation, RowArray
from blockstore.store import Store, open_store, scan_rows
from blockstore.units import format_bytes
from preprocess.cli.dryrun import source_bytes
from preprocess.cli.info import hops_text
from preprocess.files.store import graph_blocks
from preprocess.kernels.edges import mark_nodes
from preprocess.partition.report import partition_lines
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import format_seconds
from preprocess.pipeline.result import IngestResult, QuantizationError, StageResult
from preprocess.sources.source import Source

_BAR = 30  # characters
_BUFFER_BYTES = 4 << 20
_MOST_CLASSES = 1 << 16  # labels with more values count as numbers
_TOP = 5


@dataclass(frozen=True, slots=True)
class Bin:
    """Columns whose degree lies in [low, high]."""

    low: int
    high: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Degrees:
    """In-degrees of the nodes that a relation points to; exact."""

    min: int
    median: int  # the lower one of two
    mean: float
    p99: int
    max: int
    histogram: tuple[Bin, ...]  # degrees 0, 1, 2-3, 4-7, ..., ascending


@dataclass(frozen=True, slots=True)
class RelationSummary:
    name: str  # "src-name-dst"
    num_edges: int
    num_source_edges: int  # before reverses were added, or edges dropped
    degrees: Degrees
    splits: Mapping[str, int]  # number of edges in each


@dataclass(frozen=True, slots=True)
class ClassCount:
    """How often a class, or a column of multi-label rows, occurs."""

    label: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Labels:
    kind: str  # "classes", "multi-label" or "numbers"
    num_labelled: int
    num_classes: int  # classes that occur, or columns; 0 for numbers
    top: tuple[ClassCount, ...]  # the most frequent ones first
    least: float | None = None  # for labels that are numbers
    mean: float | None = None
    greatest: float | None = None


@dataclass(frozen=True, slots=True)
class TypeSummary:
    name: str
    num_nodes: int
    num_isolated: int  # without any edge, in or out, in any relation
    labels: Labels | None
    splits: Mapping[str, int]  # number of nodes in each


@dataclass(frozen=True, slots=True)
class StoreSummary:
    types: tuple[TypeSummary, ...]
    relations: tuple[RelationSummary, ...]


def summarise(store: Store, progress: Progress) -> StoreSummary:
    """Read graphs and labels once.  Raises CorruptBlock."""
    manifest = store.manifest
    has_edge = np.zeros(manifest.num_nodes, np.uint8)
    sizes = {t.name: t.num_nodes for t in manifest.types}
    relations = []
    total = sum(r.num_edges for r in manifest.relations)
    with progress.recorded("summary"), progress.stage("degrees", total, "edges") as stage:
        for relation in manifest.relations:
            counts = Counter[int]()
            for degrees, num_edges in _scan_graph(store, relation, has_edge):
                count_values(degrees, counts)
                stage.advance(num_edges)
            num_nodes = counts.total()
            assert num_nodes == sizes[relation.dst]
            name = relation.title
            listed, splits = relation.num_source_edges, _sizes(relation.splits)
            relations.append(
                RelationSummary(name, relation.num_edges, listed, degrees_of(counts), splits)
            )
        types = tuple(_summarise_type(store, t, has_edge) for t in manifest.types)
    return StoreSummary(types, tuple(relations))


def count_values(values: NDArray[Any], totals: Counter[int]) -> None:
    """Add the number of times that each value occurs to `totals`."""
    found, counts = np.unique(values, return_counts=True)
    totals.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def degrees_of(totals: Counter[int]) -> Degrees:
    """Statistics from the number of nodes of each degree; all 0 if there are no nodes."""
    if not totals:
        return Degrees(0, 0, 0.0, 0, 0, ())
    values, counts = (np.array(each) for each in zip(*sorted(totals.items()), strict=True))
    ends, num_nodes = np.cumsum(counts), totals.total()

    def at(rank: int) -> int:
        return int(values[np.searchsorted(ends, rank, side="right")])

    return Degrees(
        min=int(values[0]),
        median=at((num_nodes - 1) // 2),
        mean=float((values * counts).sum() / num_nodes),
        p99=at(min(num_nodes - 1, num_nodes * 99 // 100)),
        max=int(values[-1]),
        histogram=_bins(values, counts),
    )


def _bins(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Bin, ...]:
    """Bins for 0, then by powers of two."""
    bits = [int(v).bit_length() for v in values.tolist()]
    total = np.bincount(bits, weights=counts, minlength=bits[-1] + 1).astype(np.int64)
    return tuple(
        Bin((1 << b) >> 1, max(0, (1 << b) - 1), int(total[b])) for b in range(bits[0], total.size)
    )


def _scan_graph(
    store: Store, relation: Relation, has_edge: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """(degrees of the columns that start in a block, edges in the block), for each block.

    has_edge   uint8 (num_nodes of all types,)   out: 1 for both ends of every edge
    """
    for _, block in graph_blocks(store, relation, _BUFFER_BYTES):
        degrees, header = block.degrees_here(), block.header
        if header.num_nodes:
            degrees[-1] = header.last_degree
        has_edge[header.first_node : header.first_node + header.num_nodes][degrees > 0] = 1
        mark_nodes(block.sources, has_edge)
        yield degrees, header.num_edges


def _summarise_type(store: Store, t: NodeType, has_edge: NDArray[np.uint8]) -> TypeSummary:
    connected = int(np.count_nonzero(has_edge[t.first : t.first + t.num_nodes]))
    return TypeSummary(
        name=t.name,
        num_nodes=t.num_nodes,
        num_isolated=t.num_nodes - connected,
        labels=None if t.label is None else _summarise_labels(store, t.label),
        splits=_sizes(t.splits),
    )


def _sizes(splits: Mapping[str, RowArray]) -> dict[str, int]:
    return {name: array.num_rows for name, array in splits.items()}


def _summarise_labels(store: Store, label: RowArray) -> Labels:
    if label.row_items > 1:
        return _multi_label(store, label)
    if label.dtype.startswith("float"):
        return _numbers(store, label)
    classes = Counter[int]()
    for _, rows in scan_rows(store, label, _BUFFER_BYTES):
        count_values(rows[rows != -1], classes)
        if len(classes) > _MOST_CLASSES:
            return _numbers(store, label)
    top = sorted(classes.items(), key=lambda item: (-item[1], item[0]))[:_TOP]
    counts_of = tuple(ClassCount(*item) for item in top)
    return Labels("classes", classes.total(), len(classes), counts_of)


def _multi_label(store: Store, label: RowArray) -> Labels:
    """Columns are classes; a row that has only -1 or NaN has no label."""
    positive, labelled = np.zeros(label.row_items, np.int64), 0
    for _, rows in scan_rows(store, label, _BUFFER_BYTES):
        values = rows.reshape(rows.shape[0], -1)
        known = ~np.isnan(values) if values.dtype.kind == "f" else values != -1
        labelled += int(known.any(axis=1).sum())
        positive += ((values > 0) & known).sum(axis=0)
    order = np.argsort(-positive, kind="stable")[:_TOP].tolist()
    top = tuple(ClassCount(column, int(positive[column])) for column in order)
    return Labels("multi-label", labelled, label.row_items, top)


def _numbers(store: Store, label: RowArray) -> Labels:
    least, greatest, total, labelled = np.inf, -np.inf, 0.0, 0
    for _, rows in scan_rows(store, label, _BUFFER_BYTES):
        known = ~np.isnan(rows) if rows.dtype.kind == "f" else rows != -1
        values = rows[known].astype(np.float64)
        if values.size:
            least, greatest = min(least, float(values.min())), max(greatest, float(values.max()))
            total += float(values.sum())
            labelled += values.size
    if not labelled:
        return Labels("numbers", 0, 0, ())
    return Labels("numbers", labelled, 0, (), least, total / labelled, greatest)


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """The store that an ingest has made, and its cost."""

    graph: StoreSummary
    source_bytes: int
    store_bytes: int
    elapsed_s: float  # of all stages, those of earlier runs included
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
        elapsed_s=result.elapsed_s,
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
    """What training on the store would lack, with the ingest option that provides it."""
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
    """The part of a summary that depends on the store alone."""
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
    ends = [(b.low, b.high) for b in degrees.histogram]
    names = [f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high in ends]
    width = max([len(name) for name in names], default=0)
    for name, b in zip(names, degrees.histogram, strict=True):
        bar = "█" * -(-b.num_nodes * _BAR // most)
        lines.append(f"              {name:>{width}}  {b.num_nodes:>13,}  {bar}".rstrip())
    return lines
