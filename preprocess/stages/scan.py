"""Check every id of edges and splits, and count the edges of each target, in one pass."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.ahead import Arrays, deal
from preprocess.kernels.edges import count_targets
from preprocess.pipeline.progress import Progress
from preprocess.sources.source import Source, SourceRelation, SourceRows

_READ_BYTES = 16  # the two ends of an edge as they are read
COUNTERS = 3  # threads; each has counts of its own, if half of the share holds them
_MAX_CHUNK = 1 << 19  # edges
_SPLIT_IDS = 1 << 16


def count_edges(
    source: Source,
    relation: SourceRelation,
    undirected: bool,
    keep_loops: bool,
    share: int,
    progress: Progress,
    span: range | None = None,
    counters: int = COUNTERS,
) -> NDArray[np.uint32]:
    """Count the edges of each target, with reverses, before equal edges are dropped.

    span      range of the edges to count; None: all
    counters  maximum number of threads

    Returns uint32 (num_nodes of the dst type,).  Raises BadInput: an id out of range.
    """
    counts = np.zeros(source.num_nodes[relation.dst], np.uint32)
    more = min(counters - 1, share // 2 // max(1, counts.nbytes))
    parts = [counts, *(np.zeros_like(counts) for _ in range(more))]
    chunk = max(1, min(_MAX_CHUNK, share // 4 // (_READ_BYTES * (2 + len(parts)))))
    done, total = 0, relation.num_edges if span is None else len(span)

    def read() -> Iterator[tuple[Arrays]]:
        nonlocal done
        for ends in source.edges(relation, chunk, span):
            yield (ends,)
            done += ends[0].size
            stage.advance(ends[0].size)

    def count(part: NDArray[np.uint32], ends: Arrays, _: object) -> None:
        count_targets(ends[0], ends[1], undirected, keep_loops, part)

    with progress.stage("count edges", total, "edges") as stage:
        deal(read(), [partial(count, part) for part in parts])
    for part in parts[1:]:
        counts += part
    if done != total:
        raise BadInput.at(relation.where, f"{done:,} edges", f"{total:,}", "it changed while read")
    return counts


def check_splits(source: Source, node_type: str, left_out: Collection[str] = ()) -> None:
    """Check that every id of a split is valid, and no node is in two splits; 1 byte a node.

    left_out   names of splits that are not checked

    Raises BadInput.
    """
    splits = [s for s in source.splits(node_type) if s.name not in left_out]
    if not splits:
        return
    owner = np.zeros(source.num_nodes[node_type], np.uint8)
    for number, split in enumerate(splits, 1):
        done = 0
        for ids in source.rows(split, _SPLIT_IDS):
            good = (ids >= 0) & (ids < owner.size)
            held = owner[ids[good].astype(np.int64)]
            good[good] = (held == 0) | (held == number)
            if not good.all():
                bad = int(good.argmin())
                raise _bad_id(split, done + bad, int(ids[bad]), owner, splits)
            owner[ids.astype(np.int64)] = number
            done += ids.size


def _bad_id(
    split: SourceRows, at: int, node: int, owner: NDArray[np.uint8], splits: Sequence[SourceRows]
) -> BadInput:
    where = f"{split.where}[{at}]"
    if not 0 <= node < owner.size:
        return BadInput.at(where, f"node id {node}", f"0 to {owner.size - 1}", "correct the split")
    other = Path(splits[owner[node] - 1].where).name
    return BadInput.at(
        where, f"node {node}, which is in {other} too", "splits that do not overlap",
        f"take it out of one of them, or one of them out with --leave-out {split.name}",
    )  # fmt: skip


def check_edge_splits(
    source: Source, relation: SourceRelation, left_out: Collection[str] = ()
) -> None:
    """Check that every row is a valid edge position or pair of node ids.  Raises BadInput."""
    maximum = np.array([source.num_nodes[relation.src], source.num_nodes[relation.dst]])
    for split in [s for s in source.edge_splits(relation) if s.name not in left_out]:
        if split.row_shape not in ((), (2,)) or split.dtype.kind not in "iu":
            raise BadInput.at(
                split.where, f"{split.dtype} of shape {split.row_shape}",
                "positions of edges, or pairs of node ids", "correct the split",
            )  # fmt: skip
        limits = maximum if split.row_shape else np.array([relation.num_edges])
        done = 0
        for rows in source.rows(split, _SPLIT_IDS):
            ids = rows.reshape(rows.shape[0], -1)
            bad = np.argwhere((ids < 0) | (ids >= limits))
            if bad.size:
                at, column = bad[0].tolist()
                raise BadInput.at(
                    f"{split.where}[{done + at}]", ids[at, column],
                    f"0 to {limits[column] - 1}", "correct the split",
                )  # fmt: skip
            done += rows.shape[0]
