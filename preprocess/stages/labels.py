"""Labels: their dtype, the labelled nodes, seeded splits of these, and classes for partitioning.

Partitioning balances classes: one for each label of training nodes, and one for all other nodes.
Training nodes without a label have a class of their own.  A node with several labels belongs to the
one that is rarest among training nodes, of equals the first column: the rarest label is the hardest
to spread evenly.  Labels that are not classes (floats that are not whole numbers, or more than
MAX_CLASSES values) form a single class.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.random import make_key, permute_range
from preprocess.errors import BadInput
from preprocess.ingest.contents import SPLITS, Contents, TypeContents
from preprocess.sources.source import Source, SourceRows
from preprocess.stages.rows import source_chunk

_EXACT = 2.0**53  # float64 represents every whole number up to here exactly
_STEP = 1 << 16  # nodes, a multiple of 8
_PURPOSE = 0x5370_6C69  # part of the random key that no other draw uses
_SPLIT_IDS = 1 << 16  # read at a time
MAX_CLASSES = 4096  # of a type
_MAX_OF_ALL = (1 << 16) - 2  # with the class of other nodes, classes of all types fit in uint16

Pieces = Callable[[], Iterator[NDArray[Any]]]


def label_dtype(rows: SourceRows, whole: bool) -> str:
    if rows.dtype.kind == "f":
        return "int64" if whole else "float32"
    return "uint8" if rows.dtype.kind == "b" else rows.dtype.name


def are_whole(source: Source, rows: SourceRows, share: int) -> bool:
    """Whether float labels are classes: whole numbers, or NaN for nodes without a label."""
    for piece in source.rows(rows, source_chunk(rows, share)):
        values = piece[~np.isnan(piece)].astype(np.float64)
        if not ((np.abs(values) < _EXACT) & (values == np.floor(values))).all():
            return False
    return True


def label_pieces(
    source: Source, rows: SourceRows, dtype: str, share: int
) -> Iterator[NDArray[Any]]:
    """Labels in the source's order, as stored; NaN becomes -1 if they are classes.

    Raises BadInput: a number that float32 cannot hold.
    """
    done = 0
    for piece in source.rows(rows, source_chunk(rows, share)):
        if piece.dtype.kind == "f" and dtype == "int64":
            yield np.where(np.isnan(piece), -1.0, piece).astype(np.int64)
        else:
            with np.errstate(over="ignore"):
                out = piece.astype(np.dtype(dtype), copy=False)
            if out.dtype.kind == "f" and (np.isinf(out) & np.isfinite(piece)).any():
                bad = np.argwhere(np.isinf(out) & np.isfinite(piece))[0]
                raise BadInput.at(
                    f"{rows.where}[{done + bad[0]}]", f"label {piece[tuple(bad)]:g}",
                    "less than 3.4e38 for float32", "scale the labels",
                )  # fmt: skip
            yield out
        done += piece.shape[0]


def have_labels(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each node has a label other than -1 and NaN; in a row of labels one is enough."""
    known = ~np.isnan(rows) if rows.dtype.kind == "f" else rows != -1
    found: NDArray[np.bool_] = known.reshape(rows.shape[0], -1).any(axis=1)
    return found


def labelled_bits(source: Source, rows: SourceRows, dtype: str, share: int) -> NDArray[np.uint8]:
    """A packed bit for each node: whether it has a label.  Takes a byte a node while reading."""
    flags, done = np.zeros(rows.num_rows, np.bool_), 0
    for piece in label_pieces(source, rows, dtype, share):
        flags[done : done + piece.shape[0]] = have_labels(piece)
        done += piece.shape[0]
    return np.packbits(flags)


def seeded_ids(
    bits: NDArray[np.uint8], num_nodes: int, total: int, places: tuple[int, int], key: int
) -> Iterator[NDArray[np.int64]]:
    """Ids of a seeded split, ascending: the labelled nodes whose positions in a keyed permutation
    of all `total` labelled nodes lie in `places`, (first, stop).
    """
    low, high = places
    before = 0  # labelled nodes
    for first in range(0, num_nodes, _STEP):
        flags = np.unpackbits(bits[first // 8 : (first + _STEP) // 8])[: num_nodes - first]
        ids = first + np.flatnonzero(flags)
        order = np.empty(ids.size, np.int64)
        permute_range(before, before + ids.size, total, np.uint64(key), order)
        yield ids[(low <= order) & (order < high)]
        before += ids.size


def split_key(seed: int, type_number: int) -> int:
    """Key of the random split of one type."""
    return make_key(seed, _PURPOSE, type_number, 0, 0)


class TrainingNodes(NamedTuple):
    """Readers of a type's training nodes and labels; each call reads them from the beginning."""

    first: int  # number of the type's first node
    ids: Pieces  # of training nodes, by id in the type
    labels: Pieces | None  # of all nodes of the type; -1 or NaN: no label


class NodeClasses(NamedTuple):
    of_node: NDArray[np.uint16]  # (num_nodes,)
    num_classes: int  # classes of training nodes; other nodes have class `num_classes`

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of nodes of each class; the class of other nodes is the last."""
        total = np.zeros(self.num_classes + 1, np.int64)
        for first in range(0, self.of_node.size, _STEP):
            total += np.bincount(self.of_node[first : first + _STEP], minlength=total.size)
        return total


def source_classes(
    source: Source,
    contents: Contents,
    label_dtypes: Mapping[str, str],
    share: int,
    seeded: Callable[[TypeContents], Pieces | None],
) -> NodeClasses:
    """Classes of a source's nodes.

    label_dtypes  dtypes of stored labels by type, if they differ from those of the header
    seeded        returns a reader of a type's training nodes in a seeded split; None: no such split
    """
    parts = []
    for t in contents.types:
        train = seeded(t)
        listed = next((r.source for r in t.splits if r.source.name == SPLITS[0]), None)
        if train is None and listed is not None:
            train = partial(source.rows, listed, _SPLIT_IDS)
        labels = None
        if t.label is not None:
            dtype = label_dtypes.get(t.name, t.label.array.dtype)
            labels = partial(label_pieces, source, t.label.source, dtype, share)
        if train is not None:
            parts.append(TrainingNodes(t.first, train, labels))
    return read_classes(parts, contents.num_nodes)


def read_classes(parts: list[TrainingNodes], num_nodes: int) -> NodeClasses:
    """Find the classes in two reads of the labels; takes 2 bytes a node, and buffers."""
    of_node = np.zeros(num_nodes, np.uint16)
    count = 0
    for part in parts:
        marked = 0
        for ids in part.ids():
            of_node[part.first + ids.astype(np.int64)] = 1
            marked += ids.size
        if marked:
            count += _number(part, of_node, count)
    of_node[of_node == 0] = count + 1
    of_node -= np.uint16(1)
    return NodeClasses(of_node, count)


def _number(part: TrainingNodes, of_node: NDArray[np.uint16], before: int) -> int:
    """Give the nodes marked 1 in a type numbers from before + 1 on; returns how many are used."""
    found = None if part.labels is None else _values(part.labels, of_node, part.first)
    if found is None or part.labels is None or before + found.size > _MAX_OF_ALL:
        for ids in part.ids():
            of_node[part.first + ids.astype(np.int64)] = before + 1
        return 1
    at, is_rows = part.first, False
    used = np.zeros(found.size + 1, np.bool_)
    ascending = np.sort(found)
    for piece in part.labels():
        here = of_node[at : at + piece.shape[0]]
        train = np.flatnonzero(here)
        rows = _flat(piece)[train]
        is_rows = rows.shape[1] > 1
        if is_rows:  # the rarest positive column
            marked = rows[:, found] > 0
            numbers = np.where(marked.any(axis=1), marked.argmax(axis=1), found.size)
        else:
            numbers = np.searchsorted(ascending, rows[:, 0])
        here[train] = before + 1 + numbers
        used[numbers] = True
        at += piece.shape[0]
    _close_gaps(of_node[part.first : at], before, used)
    return int(used.sum())


def _close_gaps(of_node: NDArray[np.uint16], before: int, used: NDArray[np.bool_]) -> None:
    """Renumber so that no number is unused."""
    if used[:-1].all() or not used.any():
        return
    renumbered = np.arange(before + 1 + used.size, dtype=np.uint16)
    renumbered[before + 1 :] = before + np.cumsum(used)
    for first in range(0, of_node.size, _STEP):
        some = of_node[first : first + _STEP]
        some[some > before] = renumbered[some[some > before]]


def _values(labels: Pieces, of_node: NDArray[np.uint16], first: int) -> NDArray[Any] | None:
    """Label values of training nodes, or columns from the rarest on; None: a single class."""
    values, positive = np.empty(0, np.int64), None
    for piece in labels():
        train = of_node[first : first + piece.shape[0]] != 0
        first += piece.shape[0]
        rows = _flat(piece)[train]
        if rows.shape[1] > 1:
            marked = (rows > 0).sum(axis=0)  # NaN is not
            positive = marked if positive is None else positive + marked
        elif rows.dtype.kind == "f":
            return None
        else:
            values = np.union1d(values, rows)
        if values.size > MAX_CLASSES:
            return None
    if positive is None:
        return values
    return None if positive.size > MAX_CLASSES else np.argsort(positive, kind="stable")


def _flat(rows: NDArray[Any]) -> NDArray[Any]:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
