"""Counting and sorting edges, and placing rows, by tasks of an executor.

Each fill task reads a range of edges or rows, and writes a file of buckets; then each sort or place
task merges one bucket from all of these files.  The results do not depend on the ranges and
buckets: they are those of one process by `stages.scan`, `stages.csc` and `stages.rows`, whose
functions also do the work here.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray, row_geometry
from blockstore.store import numpy_dtype
from blockstore.writer import RowsPart, StoreWriter
from preprocess.files.array_file import load_array, remove_file
from preprocess.files.buckets import Buckets, KeptBuckets
from preprocess.kernels.edges import Ends
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.tasks import SavedArray, TaskFolder, cut_spans, own_name, put_array
from preprocess.sources.source import Source, SourceRelation, SourceRows
from preprocess.stages.columns import ColumnFile, Renaming, renamed_edges
from preprocess.stages.csc import (
    BUCKET_BYTES,
    ColumnSorter,
    RawEdges,
    WholeColumns,
    Widths,
    cut_buckets,
    fill_buckets,
    source_edges,
)
from preprocess.stages.rows import checked_features, chunk_rows, fill_row_buckets, with_ranks

_MIN_BUCKET = 1 << 16  # bytes; sorting less is not worth starting a task
_MAX_ROW_BUCKET, _MAX_ROW_SPAN = 64 << 20, 1 << 29  # bytes


class EdgeReader(NamedTuple):
    """Reads ranges of edges, in this process or in tasks: it is pickled."""

    num_edges: int  # before reverses are added
    divides: bool  # whether tasks can read ranges of the edges
    fold: int  # maximum number of records of an edge
    # (bytes of memory, progress, span or None for all) -> records of columns and sources
    read: Callable[[int, Progress, range | None], Iterator[RawEdges]]


class EndRanks(NamedTuple):
    """Store ids of the nodes at both ends of a relation: slices of the array for all nodes."""

    rank: SavedArray
    src: slice
    dst: slice


def read_relation(
    source: Source,
    relation: SourceRelation,
    ends: Ends,
    with_ids: bool,
    ranks: EndRanks | None,
    share: int,
    progress: Progress,
    span: range | None,
) -> Iterator[RawEdges]:
    """Edges of a relation of the source, by store ids; without `ranks` as `ends` says."""
    if ranks is not None:
        rank = ranks.rank.values
        ends = ends._replace(src_rank=rank[ranks.src], dst_rank=rank[ranks.dst])
    return source_edges(source, relation, ends, with_ids, share, progress, span)


def read_columns(
    path: Path, degrees: SavedArray, rank: SavedArray, base: int, share: int, progress: Progress,
    span: range | None,
) -> Iterator[RawEdges]:  # fmt: skip
    """Columns by source id in a file, both ends renamed; `base`: store id of the first column."""
    with ColumnFile.reopen(path, degrees.values) as file:
        yield from renamed_edges(file, Renaming(rank.values, base), share, progress, span)


class CountTask(NamedTuple):
    work: Callable[..., NDArray[np.uint32]]  # takes progress, a span and a number of threads
    span: range
    out: Path  # file of the counts

    def run(self, progress: Progress) -> None:
        put_array(self.out, self.work(progress, self.span, 1))


def spread_counts(
    count: Callable[..., NDArray[np.uint32]], num_edges: int, num_nodes: int, folder: TaskFolder
) -> NDArray[np.uint32]:
    """As `count_edges`, by tasks that read a span each and whose counts are added up.

    count   `count_edges`, of which only progress, span and threads are left to pass
    """
    each = -(-num_edges // folder.workers)
    tasks = [
        CountTask(count, span, folder.path / f"counts-{i}")
        for i, span in enumerate(cut_spans(num_edges, each))
    ]
    counts = np.zeros(num_nodes, np.uint32)
    sizes = [len(t.span) for t in tasks]
    with closing(folder.run("count edges", "edges", tasks, sizes)) as results:
        for number, _ in results:
            counts += load_array(tasks[number].out, np.uint32)
            remove_file(tasks[number].out)
    return counts


class FillTask(NamedTuple):
    """Put the edges of a span into the buckets of their targets, in a file of its own."""

    reader: EdgeReader
    span: range
    bounds: NDArray[np.int64]  # first column of each bucket, then the end
    sizes: NDArray[np.int64]  # (buckets,) maximum records of each
    widths: Widths
    share: int
    out: Path

    def run(self, progress: Progress) -> KeptBuckets:
        records = self.reader.read(self.share // 4, progress, self.span)
        maximum = np.minimum(self.sizes, self.reader.fold * len(self.span))
        room, parts = self.share // 8, self.widths.parts
        with Buckets(own_name(self.out), maximum, parts, False, room, sparse=True) as buckets:
            fill_buckets(records, self.bounds, self.widths, buckets, fillers=1)
            return buckets.keep(self.out)


class SortTask(NamedTuple):
    """Sort a bucket from the files of all fill tasks into columns, in three files."""

    filled: Sequence[KeptBuckets]  # restricted to the one bucket
    first: int  # columns [first, stop)
    stop: int
    widths: Widths
    drop_equal: bool
    out: Path

    def run(self, _: Progress) -> None:
        taken = [self._take(part, dtype) for part, (dtype, _) in enumerate(self.widths.parts)]
        ids = taken[1] if self.widths.edge else None
        sorter = ColumnSorter(self.widths, self.drop_equal)
        columns = sorter.from_bucket(taken[0], ids, self.first, self.stop)
        for path, values in zip(self._files, (columns.degrees, *columns[2:]), strict=True):
            if values is not None:
                put_array(path, values)

    def result(self) -> WholeColumns:
        """Read the files that the task has written, in any process, and remove them."""
        dtypes, held = ("int64", self.widths.node, self.widths.edge), []
        for path, dtype in zip(self._files, dtypes, strict=True):
            held.append(None if dtype is None else load_array(path, dtype))
            path.unlink(missing_ok=True)
        degrees, sources, edge_ids = held
        assert degrees is not None
        assert sources is not None
        return WholeColumns(self.first, degrees, sources, edge_ids)

    @property
    def _files(self) -> list[Path]:
        return [self.out.with_suffix(f".{name}") for name in ("degrees", "sources", "ids")]

    def _take(self, part: int, dtype: Any) -> NDArray[Any]:
        """One part (keys or ids) of all records."""
        ends = np.cumsum([0, *(int(kept.filled[0]) for kept in self.filled)])
        out = np.empty(int(ends[-1]), dtype)
        for kept, low, high in zip(self.filled, ends[:-1], ends[1:], strict=True):
            kept.read(0, part, 0, out[low:high], out.itemsize)
        return out


def spread_columns(
    readers: Sequence[EdgeReader],
    counts: NDArray[np.uint32],
    widths: Widths,
    drop_equal: bool,
    share: int,
    folder: TaskFolder,
    progress: Progress,
) -> Generator[WholeColumns]:
    """As `sorted_columns`, by tasks.

    readers   edges that cannot be divided are read by this process
    share     bytes of memory of a task, and of this process
    """
    total = int(counts.sum(dtype=np.int64)) * widths.sort_bytes
    usual = max(_MIN_BUCKET, min(BUCKET_BYTES, total // (4 * folder.workers)))
    bounds, sizes = cut_buckets(counts, widths, share // 4 * 3, usual_bytes=usual)
    del counts

    def fill(number: int, reader: EdgeReader, span: range) -> FillTask:
        out = folder.path / f"edges-{number}-{span.start}"
        return FillTask(reader, span, bounds, sizes, widths, share, out)

    fills = [
        fill(number, reader, span)
        for number, reader in enumerate(readers)
        if reader.divides
        for span in folder.spans(reader.num_edges)
    ]
    sizes_of = [len(task.span) for task in fills]
    filled = list(folder.in_order("bucket edges", "edges", fills, sizes_of))
    for number, reader in enumerate(readers):
        if not reader.divides:
            filled.append(fill(number, reader, range(reader.num_edges)).run(progress))
    sorts = [
        SortTask(
            _of_bucket(filled, b), int(bounds[b]), int(bounds[b + 1]), widths, drop_equal,
            folder.path / f"columns-{b}",
        )
        for b in range(sizes.size)
    ]  # fmt: skip
    with closing(folder.in_order("sort columns", "edges", sorts, sizes.tolist())) as results:
        for task, _ in zip(sorts, results, strict=True):
            yield task.result()
    for kept in filled:
        remove_file(kept.path)


def _of_bucket(filled: Sequence[KeptBuckets], bucket: int) -> list[KeptBuckets]:
    """The files as a task needs them: restricted to its one bucket, which becomes number 0."""
    some = slice(bucket, bucket + 1)
    return [
        KeptBuckets(kept.path, kept.begins[some], kept.filled[some])
        for kept in filled
        if kept.filled[bucket]
    ]


class FeaturePlaces(NamedTuple):
    """A feature array of the source, and the new positions of its rows."""

    source: Source
    rows: SourceRows
    array: RowArray
    allow_nan: bool
    rank: SavedArray | None  # store id of each node; None: rows keep their order
    first: int  # number of the type's first node


class FillRowsTask(NamedTuple):
    """Check and convert the rows of a span, and put them into the buckets of their positions."""

    of: FeaturePlaces
    span: range
    per_bucket: int
    share: int
    out: Path

    def run(self, progress: Progress) -> KeptBuckets:
        array, span, first = self.of.array, self.span, self.of.first
        if self.of.rank is None:
            places = np.arange(span.start, span.stop, dtype=np.uint64)
        else:
            places = self.of.rank.values[first + span.start : first + span.stop]
            places = places.astype(np.uint64) - np.uint64(first)
        pieces = checked_features(
            self.of.source, self.of.rows, array.dtype, self.of.allow_nan, self.share, span
        )
        num_buckets = -(-array.num_rows // self.per_bucket)
        sizes = np.full(num_buckets, min(self.per_bucket, len(span)), np.int64)
        parts = [(numpy_dtype(array.dtype), array.row_items), (places.dtype, 1)]
        name, room = own_name(self.out), self.share // 8
        with (
            progress.stage(array.path, len(span) * array.row_bytes, "B") as step,
            Buckets(name, sizes, parts, False, room, sparse=True) as buckets,
        ):
            fill_row_buckets(with_ranks(pieces, places), self.per_bucket, buckets, step.advance)
            return buckets.keep(self.out)


class PlaceRowsTask(NamedTuple):
    """Write a bucket's rows, from all files, in order into their blocks; returns page CRCs."""

    filled: Sequence[KeptBuckets]  # restricted to the one bucket
    array: RowArray
    span: range  # rows of the store
    share: int
    root: Path  # of the store being written
    block_bytes: int
    buffer_bytes: int

    def run(self, _: Progress) -> NDArray[np.uint32]:
        array, first = self.array, self.span.start
        dtype = numpy_dtype(array.dtype)
        dense = np.empty((len(self.span), *array.row_shape), dtype)
        step = chunk_rows(array.row_bytes, self.share)
        for kept in self.filled:
            held = int(kept.filled[0])
            for low in range(0, held, step):
                rows = np.empty((min(step, held - low), *array.row_shape), dtype)
                places = np.empty(rows.shape[0], np.uint64)
                kept.read(0, 0, low, rows, array.row_bytes)
                kept.read(0, 1, low, places, places.itemsize)
                dense[places - np.uint64(first)] = rows
        block = first // row_geometry(array, self.block_bytes).rows_per_block
        part = RowsPart(self.root, array, self.block_bytes, self.buffer_bytes, block)
        part.append(dense)
        return part.end()


def spread_rows(
    of: FeaturePlaces, share: int, folder: TaskFolder, writer: StoreWriter, buffer_bytes: int
) -> None:
    """As `place_rows`, but tasks write the array, some blocks each.

    share          bytes of memory of a task
    buffer_bytes   bytes of each of the two buffers of a task
    """
    array = of.array
    per_block = row_geometry(array, writer.block_bytes).rows_per_block
    blocks = min(_MAX_ROW_BUCKET, share // 4) // (per_block * array.row_bytes)
    per_bucket = (
        max(1, min(blocks, -(-array.num_rows // (4 * folder.workers * per_block)))) * per_block
    )
    fills = [
        FillRowsTask(of, span, per_bucket, share, folder.path / f"rows-{span.start}")
        for span in folder.spans(array.num_rows, _MAX_ROW_SPAN // array.row_bytes)
    ]
    row_bytes = array.row_bytes
    bytes_of = [len(task.span) * row_bytes for task in fills]
    filled = list(folder.in_order(f"{array.path}: bucket rows", "B", fills, bytes_of))
    writer.begin_parts(array)
    places = [
        PlaceRowsTask(
            _of_bucket(filled, b), array, span, share, writer.folder, writer.block_bytes,
            buffer_bytes,
        )
        for b, span in enumerate(cut_spans(array.num_rows, per_bucket))
    ]  # fmt: skip
    bytes_of = [len(task.span) * row_bytes for task in places]
    crcs = list(folder.in_order(array.path, "B", places, bytes_of))
    writer.end_parts(array, np.concatenate(crcs))
    for kept in filled:
        remove_file(kept.path)
