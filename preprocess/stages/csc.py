"""Edges in any order -> columns in order: a bucketed external counting sort.

The number of edges of each target is known, so targets are divided into ranges whose edges can be
sorted in the given memory.  Edges go to the bucket of their target, in memory if all fit, else in
one file, and each bucket is sorted by (target, source, edge id).  No step holds the edge list.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.io.buffers import aligned_buffer
from preprocess.files.ahead import Arrays, deal
from preprocess.files.buckets import Buckets, passing_bytes
from preprocess.kernels.edges import (
    Cuts,
    Ends,
    Records,
    add_ids,
    cut_ranges,
    expand_edges,
    group_columns,
    group_edges,
    split_values,
)
from preprocess.pipeline.progress import Progress
from preprocess.sources.source import Source, SourceRelation

FILLERS = 3  # threads that bring edges into buckets
# memory of a record in a thread: its fields 24, bucket 4, key and id 16
RECORD_BYTES = 44
_READ_EDGE_BYTES = 16  # an edge of the source, in each copy: read, converted, and in each thread
_SORTERS = 3  # threads that sort a bucket each
COLUMN_BYTES = 16  # memory of a column while its bucket is sorted
BUCKET_BYTES = 32 << 20  # larger buckets are not faster to sort ...
_MAX_BUCKETS = 512  # ... but too many buckets cause small writes
_GUIDE_BITS = 14
_MAX_CHUNK = 1 << 19  # edges


class WholeColumns(NamedTuple):
    """Consecutive whole columns; valid until the next ones are made."""

    first: int  # node of the first column
    degrees: NDArray[np.int64]
    sources: NDArray[Any]  # ascending in a column
    edge_ids: NDArray[Any] | None  # ascending among equal edges


class RawEdges(NamedTuple):
    """Edges as they are read; valid until the next step."""

    arrays: Arrays
    make: Callable[[Arrays, Records], Records]  # converts a copy of `arrays`, in the given memory
    maximum: int  # records that the memory given to `make` must hold


def ready(records: Records) -> RawEdges:
    """Wrap edges that are records already."""
    return RawEdges(tuple(records), lambda read, _: Records(*read), 0)


@dataclass(frozen=True, slots=True)
class Widths:
    """Dtypes and bits of the ids of a graph."""

    node: str  # dtype of node ids in the columns
    edge: str | None  # dtype of edge ids; None: they are not kept
    node_bits: int  # bits of a node id
    edge_bits: int  # bits of an edge id; 0 if they are not kept

    @classmethod
    def of(cls, node: str, num_nodes: int, edge: str | None, num_edges: int) -> "Widths":
        """`num_edges`: edges of the source; reverses have ids up to twice that."""
        bits = max(1, (2 * num_edges - 1).bit_length()) if edge else 0
        return cls(node, edge, max(1, (num_nodes - 1).bit_length()), bits)

    @property
    def key_bytes(self) -> int:
        """Bytes of an edge in a bucket."""
        return 8 + (np.dtype(self.edge).itemsize if self.edge else 0)

    @property
    def parts(self) -> list[tuple[Any, int]]:
        """(dtype, width) of the parts of an edge in a bucket: a key, and an edge id if kept."""
        return [(np.uint64, 1), *([(self.edge, 1)] if self.edge else [])]

    @property
    def sort_bytes(self) -> int:
        """Bytes of an edge while its bucket is sorted, those in the bucket included."""
        words = 0 if self.edge is None else 24 if self.too_wide else 8
        return self.key_bytes + words + self.column_bytes

    @property
    def column_bytes(self) -> int:
        """Bytes of an edge in a column."""
        return np.dtype(self.node).itemsize + self.key_bytes - 8

    @property
    def too_wide(self) -> bool:
        """Whether a source and an edge id do not fit in one word, so that the slow sort is used."""
        return self.node_bits + self.edge_bits > 64

    @property
    def column_bits(self) -> int:
        """Bits left for a column in a word beside source and edge id."""
        return min(62, 64 - self.node_bits - self.edge_bits)

    def num_groups(self, num_columns: int) -> int:
        """Number of groups of 2**column_bits columns."""
        return -(-num_columns >> self.column_bits) if num_columns else 0


def source_edges(
    source: Source,
    relation: SourceRelation,
    ends: Ends,
    with_ids: bool,
    share: int,
    progress: Progress,
    span: range | None = None,
) -> Iterator[RawEdges]:
    """Read the source's edges; `make` renames their ends and adds reverses, as `ends` says.

    span   range of the edges to read; None: all
    """
    fold = 2 if ends.undirected else 1
    each = (2 + FILLERS) * _READ_EDGE_BYTES + FILLERS * fold * RECORD_BYTES
    chunk = max(1, min(_MAX_CHUNK, share // each))
    no_ids = np.empty(0, np.int64)
    span = range(relation.num_edges) if span is None else span
    done = span.start

    def make(first: int, read: Arrays, out: Records) -> Records:
        out = out if with_ids else out._replace(edge_ids=no_ids)
        count = expand_edges(read[0], read[1], first, relation.num_edges, ends, out)
        return Records(*(part[:count] for part in out))

    with progress.stage("bucket edges", len(span), "edges") as stage:
        for src, dst in source.edges(relation, chunk, span):
            yield RawEdges((src, dst), partial(make, done), fold * src.size)
            done += src.size
            stage.advance(src.size)


def sorted_columns(
    records: Iterator[RawEdges],
    counts: NDArray[np.uint32],
    widths: Widths,
    drop_equal: bool,
    share: int,
    work: Path,
    progress: Progress,
) -> Generator[WholeColumns]:
    """All columns in order, neighbors ascending by (source, edge id).

    records  may use a quarter of `share`
    counts   uint32 (num_nodes,)   exact number of records of each target
    work     an existing folder for the file of buckets

    The bounds of buckets depend on the memory; the columns do not.  The longest column must fit in
    three quarters of `share`: `plan.check_longest`.
    """
    total = int(counts.sum(dtype=np.int64))
    longest = int(counts.max(initial=0)) * widths.sort_bytes + COLUMN_BYTES
    in_memory = not passing_bytes(total, widths.key_bytes, share) and longest <= share // 4
    room = share // 4 * (1 if in_memory else 3)
    bounds, sizes = cut_buckets(counts, widths, room, _SORTERS)
    del counts
    with Buckets(work / "edges", sizes, widths.parts, in_memory, share // 8) as buckets:
        fill_buckets(records, bounds, widths, buckets)
        with progress.stage("sort columns", total, "edges") as stage:
            made = _sort_buckets(buckets, bounds, sizes, widths, drop_equal, room)
            with closing(made):
                for columns in made:
                    yield columns
                    stage.advance(columns.sources.size)


def _sort_buckets(
    buckets: Buckets,
    bounds: NDArray[np.int64],
    sizes: NDArray[np.int64],
    widths: Widths,
    drop_equal: bool,
    room: int,
) -> Generator[WholeColumns]:
    """Columns of all buckets in order; as many buckets are sorted ahead as `room` bytes hold."""
    each = sizes * widths.sort_bytes + np.diff(bounds) * COLUMN_BYTES
    usual = room // _SORTERS
    free: list[ColumnSorter] = []
    waiting: deque[tuple[Future[WholeColumns], ColumnSorter, int]] = deque()
    taken = following = 0
    pool = ThreadPoolExecutor(_SORTERS, thread_name_prefix="sort")
    try:
        while waiting or following < sizes.size:
            while following < sizes.size and len(waiting) < _SORTERS:
                need = int(each[following])
                if waiting and taken + need > room:
                    break
                sorter = free.pop() if free else ColumnSorter(widths, drop_equal)
                low, high = int(bounds[following]), int(bounds[following + 1])
                future = pool.submit(sorter.from_buckets, buckets, following, low, high)
                waiting.append((future, sorter, need))
                taken, following = taken + need, following + 1
            future, sorter, need = waiting.popleft()
            yield future.result()
            taken -= need
            if need <= usual:
                free.append(sorter)  # a larger one would hold too much memory
            del future, sorter
    finally:
        pool.shutdown(cancel_futures=True)


def cut_buckets(
    counts: NDArray[np.uint32],
    widths: Widths,
    room: int,
    at_once: int = 1,
    usual_bytes: int = BUCKET_BYTES,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranges of columns that can be sorted in `room` bytes: (bounds, edges of each), int64.

    `at_once` ranges fit at the same time, unless the longest column, which must fit alone, is too
    long for that.  A range takes at most `usual_bytes`, as smaller ones are faster, unless that
    makes too many of them.
    """
    longest = int(counts.max(initial=0)) * widths.sort_bytes + COLUMN_BYTES
    assert longest <= room
    total = int(counts.sum(dtype=np.int64)) * widths.sort_bytes
    maximum = max(longest, min(room // at_once, max(usual_bytes, total // _MAX_BUCKETS)))
    return cut_ranges(counts, widths.sort_bytes, COLUMN_BYTES, maximum)


def fill_buckets(
    records: Iterator[RawEdges],
    bounds: NDArray[np.int64],
    widths: Widths,
    buckets: Buckets,
    fillers: int = FILLERS,
) -> None:
    """Put edges into the bucket of their target, in no order; `fillers`: number of threads."""
    num_nodes = int(bounds[-1])
    shift = max(0, (num_nodes - 1).bit_length() - _GUIDE_BITS)
    cells = np.arange((num_nodes >> shift) + 1, dtype=np.int64) << shift
    guide = np.maximum(np.searchsorted(bounds, cells, side="right") - 1, 0).astype(np.uint32)
    cuts = Cuts(bounds, guide, shift)
    giving = Lock()

    def fill(filler: _Filler, arrays: Arrays, raw: RawEdges) -> None:
        parts = filler.group(arrays, raw, cuts)
        with giving:
            buckets.append_grouped(filler.starts, parts)

    threads = [_Filler(widths, bounds.size) for _ in range(fillers)]
    deal(records, [partial(fill, filler) for filler in threads])
    buckets.finish()


class _Filler:
    """Groups pieces of edges by bucket, in memory that it reuses."""

    def __init__(self, widths: Widths, num_bounds: int) -> None:
        self._widths = widths
        self.starts = np.empty(num_bounds, np.int64)  # start of each bucket in the last piece
        self._records = Records(*(np.empty(0, np.int64) for _ in range(3)))
        self._bucket, self._keys = np.empty(0, np.uint32), np.empty(0, np.uint64)
        self._ids = np.empty(0, np.dtype(widths.edge or "uint32"))

    def group(self, arrays: Arrays, raw: RawEdges, cuts: Cuts) -> list[NDArray[Any]]:
        """Keys and, if kept, ids, grouped by bucket; sets `starts` to the start of each bucket.

        arrays   a copy of those of `raw`
        """
        has_ids = self._widths.edge is not None
        if self._records.dst.size < raw.maximum:
            sizes = (raw.maximum, raw.maximum, raw.maximum * has_ids)
            self._records = Records(*(np.empty(n, np.int64) for n in sizes))
        records = raw.make(arrays, self._records)
        count = records.dst.size
        if self._bucket.size < count:
            maximum = max(count, raw.maximum)
            self._bucket, self._keys = np.empty(maximum, np.uint32), np.empty(maximum, np.uint64)
            self._ids = np.empty(maximum * has_ids, self._ids.dtype)
        group_edges(
            records, count, cuts, self._widths.node_bits, self._bucket, self.starts, self._keys,
            self._ids,
        )  # fmt: skip
        return [self._keys, self._ids] if has_ids else [self._keys]


class ColumnSorter:
    """Sorts all edges of some consecutive targets into columns.

    A result is valid until the next call: memory is reused, because fresh pages cost more than
    sorting.
    """

    def __init__(self, widths: Widths, drop_equal: bool) -> None:
        self._widths, self._drop_equal = widths, drop_equal
        self._sources = np.empty(0, np.dtype(widths.node))
        self._ids = np.empty(0, np.dtype(widths.edge or "uint32"))
        self._values = np.empty(0, np.uint64)
        self._taken = [aligned_buffer(0) for _ in range(2)]  # parts read from the file of buckets

    def from_buckets(self, buckets: Buckets, bucket: int, first: int, last: int) -> WholeColumns:
        """Columns [first, last), which are those of a bucket."""
        taken: list[NDArray[Any]] = []
        for part in range(2 if self._widths.edge else 1):
            need = buckets.scratch_bytes(part, buckets.filled(bucket))
            if self._taken[part].size < need:
                self._taken[part] = aligned_buffer(need)
            taken.append(buckets.take_into(bucket, part, self._taken[part]))
        return self.from_bucket(taken[0], taken[1] if len(taken) > 1 else None, first, last)

    def from_bucket(
        self, keys: NDArray[np.uint64], ids: NDArray[Any] | None, first: int, last: int
    ) -> WholeColumns:
        """Columns [first, last) from the output of `group_edges`; `keys` is overwritten."""
        widths, num_columns = self._widths, last - first
        if widths.too_wide:
            assert ids is not None
            return _sort_wide(keys, ids, first, last, widths, self._drop_equal)
        starts = np.zeros(widths.num_groups(num_columns) + 1, np.int64)
        starts[-1] = keys.size
        values = keys
        if ids is not None and starts.size > 2:
            values = self.values(keys.size)
            group_columns(
                keys, ids, widths.node_bits, widths.edge_bits, widths.column_bits, starts, values
            )
        elif ids is not None:
            add_ids(keys, ids, widths.edge_bits)
        return self.from_values(values, starts, first, num_columns)

    def values(self, size: int) -> NDArray[np.uint64]:
        if self._values.size < size:
            self._values = np.empty(size, np.uint64)
        return self._values[:size]

    def from_values(
        self, values: NDArray[np.uint64], starts: NDArray[np.int64], first: int, num_columns: int
    ) -> WholeColumns:
        """Columns from edges as words, grouped by columns; sorts the words in place."""
        widths = self._widths
        for low, high in pairwise(starts.tolist()):
            values[low:high].sort()
        if self._sources.size < values.size:
            self._sources = np.empty(values.size, self._sources.dtype)
            self._ids = np.empty(values.size if widths.edge else 0, self._ids.dtype)
        degrees = np.empty(num_columns, np.int64)
        kept = split_values(
            values, starts, widths.node_bits, widths.edge_bits, widths.column_bits,
            self._drop_equal, degrees, self._sources, self._ids,
        )  # fmt: skip
        ids = self._ids[:kept] if widths.edge else None
        return WholeColumns(first, degrees, self._sources[:kept], ids)


def _sort_wide(
    keys: NDArray[np.uint64],
    ids: NDArray[Any],
    first: int,
    last: int,
    widths: Widths,
    drop_equal: bool,
) -> WholeColumns:
    """`from_bucket` for graphs whose source and edge id do not fit one word."""
    order = np.lexsort((ids, keys))
    keys, ids = keys[order], ids[order]
    if drop_equal and keys.size:
        keep = np.concatenate([[True], keys[1:] != keys[:-1]])
        keys, ids = keys[keep], ids[keep]
    bits = np.uint64(widths.node_bits)
    degrees = np.bincount((keys >> bits).astype(np.int64), minlength=last - first)
    sources = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.dtype(widths.node))
    return WholeColumns(first, degrees.astype(np.int64), sources, ids)
