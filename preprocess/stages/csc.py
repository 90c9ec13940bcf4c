"""Edges in any order -> columns in order: a bucketed external counting sort.

Passes: the source's edges are read once (the counts of every target are known), written to one
file of buckets by range of targets, and read back bucket by bucket.  No step holds the edge list.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall
from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact, write_exact
from blockstore.units import format_bytes
from preprocess.kernels import bucket_edges, count_targets, pack_keys, unpack_keys
from preprocess.options import IngestOptions
from preprocess.progress import Progress
from preprocess.source import Source, SourceRelation

SORT_BYTES = 40  # an edge, while its bucket is sorted; 24 more with edge ids
_NO_RANK: dict[str, NDArray[Any]] = {d: np.empty(0, np.dtype(d)) for d in ("uint32", "uint64")}


class Columns(NamedTuple):
    """Consecutive whole columns."""

    first: int  # node of the first
    degrees: NDArray[np.int64]
    sources: NDArray[Any]  # ascending in a column
    edge_ids: NDArray[Any] | None


class Dtypes(NamedTuple):
    """Widths chosen for a graph."""

    node: str  # of ids
    edge: str  # of edge ids, "" where they are not kept


def chunk_edges(mem_bytes: int) -> int:
    """Edges to read at a time: a sixteenth of the memory at 64 bytes each."""
    return max(1 << 12, min(1 << 21, mem_bytes // 16 // 64))


def count_edges(
    source: Source, relation: SourceRelation, options: IngestOptions, progress: Progress
) -> NDArray[np.uint32]:
    """Edges that each target will be given, reverses included, before equal ones are dropped.

    Returns uint32 (num_nodes,).  Raises BadInput: an id out of range.
    """
    counts = np.zeros(source.num_nodes[relation.dst], np.uint32)
    keep = options.self_loops == "keep"
    with progress.stage("count edges", relation.num_edges, "edges") as stage:
        for src, dst in source.edges(relation, chunk_edges(options.mem_bytes)):
            count_targets(src, dst, options.undirected, keep, counts)
            stage.advance(src.size)
    return counts


def cut_buckets(counts: NDArray[np.uint32], mem_bytes: int, with_ids: bool) -> NDArray[np.int64]:
    """Bounds of target ranges whose edges can be sorted within `mem_bytes`: int64 (buckets + 1,).

    Raises BudgetTooSmall: one column alone is too long; says what would do.
    """
    each = SORT_BYTES + 24 * with_ids
    most = max(1, mem_bytes // each)
    total = np.cumsum(counts, dtype=np.int64)
    bounds, done = [0], 0
    while bounds[-1] < counts.size:
        first = bounds[-1]
        last = int(np.searchsorted(total, done + most, side="right"))
        if last == first:
            raise BudgetTooSmall(
                f"node {first} has {int(counts[first]):,} in-edges, sorting them takes "
                f"{format_bytes(int(counts[first]) * each)}, {format_bytes(mem_bytes)} are left; "
                f"give at least --mem {format_bytes(3 * int(counts[first]) * each)}"
            )
        bounds.append(last)
        done = int(total[last - 1])
    return np.array(bounds, np.int64)


class BucketFile:
    """Edges by bucket in one file: per bucket its targets, its sources, its edge ids."""

    def __init__(self, path: Path, sizes: NDArray[np.int64], dtypes: Dtypes) -> None:
        """`sizes`: int64 (buckets,), edges of each."""
        self._path, self._sizes = path, sizes
        self._dtypes = [np.dtype(dtypes.node)] * 2
        if dtypes.edge:
            self._dtypes.append(np.dtype(dtypes.edge))
        self._width = sum(d.itemsize for d in self._dtypes)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]) * self._width
        self._filled = np.zeros(sizes.size, np.int64)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, bucket: int, parts: list[NDArray[Any]]) -> None:
        """More edges of a bucket.  Raises OutOfSpace."""
        at, size = int(self._filled[bucket]), int(self._sizes[bucket])
        offset = int(self._starts[bucket])
        for part, dtype in zip(parts, self._dtypes, strict=True):
            raw = byte_view(part)
            write_exact(self._fd, raw, offset + at * dtype.itemsize, str(self._path))
            offset += size * dtype.itemsize
        self._filled[bucket] += parts[0].size

    def read(self, bucket: int) -> list[NDArray[Any]]:
        """All edges of a bucket: targets, sources and, where kept, edge ids."""
        size, offset = int(self._sizes[bucket]), int(self._starts[bucket])
        assert self._filled[bucket] == size
        parts = []
        for dtype in self._dtypes:
            part = np.empty(size, dtype)
            if size:
                read_exact(self._fd, [byte_view(part)], offset, str(self._path))
                os.posix_fadvise(self._fd, offset, part.nbytes, os.POSIX_FADV_DONTNEED)
            offset += part.nbytes
            parts.append(part)
        return parts

    def flush(self) -> None:
        """Let the page cache go, so that a small control group is not filled with it."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def sorted_columns(
    source: Source,
    relation: SourceRelation,
    counts: NDArray[np.uint32],
    rank: NDArray[Any] | None,
    options: IngestOptions,
    dtypes: Dtypes,
    mem_bytes: int,
    work: Path,
    progress: Progress,
) -> Iterator[Columns]:
    """All columns in order, neighbors ascending by (source, edge id).

    counts  uint32 (num_nodes,)   from `count_edges`, in the order of the columns
    rank    node_dtype            new id of each node, or None: ids stay
    work    an existing folder for the file of buckets

    Which buckets there are follows memory; the columns do not.
    """
    bounds = cut_buckets(counts, mem_bytes // 2, bool(dtypes.edge))
    total = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    sizes = np.diff(total[bounds])
    del total
    bucket_file = BucketFile(work / f"buckets-{os.getpid()}", sizes, dtypes)
    try:
        _fill_buckets(source, relation, bounds, rank, options, dtypes, bucket_file, progress)
        bucket_file.flush()
        with progress.stage("sort columns", int(sizes.sum()), "edges") as stage:
            for b in range(sizes.size):
                first, last = int(bounds[b]), int(bounds[b + 1])
                yield _sort_bucket(bucket_file.read(b), first, last, options.drop_equal)
                stage.advance(int(sizes[b]))
    finally:
        bucket_file.close()


def _fill_buckets(
    source: Source,
    relation: SourceRelation,
    bounds: NDArray[np.int64],
    rank: NDArray[Any] | None,
    options: IngestOptions,
    dtypes: Dtypes,
    out: BucketFile,
    progress: Progress,
) -> None:
    chunk = chunk_edges(options.mem_bytes)
    room = chunk * (2 if options.undirected else 1)
    parts = [np.empty(room, np.dtype(dtypes.node)) for _ in range(2)]
    ids = np.empty(room if dtypes.edge else 0, np.dtype(dtypes.edge or "uint32"))
    starts = np.empty(bounds.size, np.int64)
    ranks = _NO_RANK[dtypes.node] if rank is None else rank
    done = 0
    with progress.stage("bucket edges", relation.num_edges, "edges") as stage:
        for src, dst in source.edges(relation, chunk):
            bucket_edges(
                src, dst, done, relation.num_edges, options.undirected,
                options.self_loops == "keep", ranks, bounds, starts, parts[0], parts[1], ids,
            )  # fmt: skip
            for b in np.flatnonzero(np.diff(starts)):
                low, high = int(starts[b]), int(starts[b + 1])
                kept = [p[low:high] for p in parts] + ([ids[low:high]] if dtypes.edge else [])
                out.append(int(b), kept)
            done += src.size
            stage.advance(src.size)


def _sort_bucket(parts: list[NDArray[Any]], first: int, last: int, drop_equal: bool) -> Columns:
    dst, src = parts[0], parts[1]
    degrees = np.zeros(last - first, np.int64)
    if dst.dtype == np.uint32 and len(parts) == 2:
        keys = np.empty(dst.size, np.uint64)
        pack_keys(dst, src, first, keys)
        keys.sort()
        kept = unpack_keys(keys, drop_equal, degrees, src)
        return Columns(first, degrees, src[:kept], None)
    by = (parts[2], src, dst) if len(parts) == 3 else (src, dst)
    order = np.lexsort(by)
    dst, src = dst[order], src[order]
    keep = np.ones(dst.size, np.bool_)
    if drop_equal:
        keep[1:] = (dst[1:] != dst[:-1]) | (src[1:] != src[:-1])
    degrees += np.bincount(
        (dst[keep] - dst.dtype.type(first)).astype(np.int64), minlength=last - first
    )
    edge_ids = parts[2][order][keep] if len(parts) == 3 else None
    return Columns(first, degrees, src[keep], edge_ids)
