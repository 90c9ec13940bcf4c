"""Classes of nodes for partitioning: a number for each training label, one for all other nodes.

A training node without a label is of a class of its own.  Of several labels it is the rarest among
training nodes, then the first column, that counts: balancing it spreads what is hardest to spread.
Labels that are no classes (other floats than whole ones, more than MOST_CLASSES values) are one
class.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preprocess.ingest.contents import SPLITS, Contents, TypeContents
from preprocess.sources.source import Source
from preprocess.stages.labels import label_pieces

_SPLIT_IDS, _STEP = 1 << 16, 1 << 18  # looked at together
MOST_CLASSES = 4096  # of a type
_MOST_OF_ALL = (1 << 16) - 2  # classes of all types fit uint16, with the one of other nodes

Pieces = Callable[[], Iterator[NDArray[Any]]]


class TrainingNodes(NamedTuple):
    """Where training nodes of a type, and its labels, are read; each call reads them again."""

    first: int  # number of the type's first node
    ids: Pieces  # of training nodes, by id in the type
    labels: Pieces | None  # of all nodes of the type, -1 or NaN where there is none


class NodeClasses(NamedTuple):
    of_node: NDArray[np.uint16]  # (num_nodes,)
    num_classes: int  # of training nodes; the next number is that of other nodes

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Nodes of each class, those of other nodes last."""
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
    """Those of a source's training nodes.

    label_dtypes  of stored labels by type, where they are known better than from the header
    seeded        reads the training nodes of a seeded split of a type; None: it has none
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
    """Two reads of the labels; 2 bytes a node, and what is looked at."""
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
    """Nodes of a type that are marked with 1 get before + 1, ...; returns how many numbers."""
    found = None if part.labels is None else _values(part.labels, of_node, part.first)
    if found is None or part.labels is None or before + found.size > _MOST_OF_ALL:
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
        if is_rows:  # the first of the columns, the rarest first, that is positive
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
    """Numbers that no node has got are given to the following ones."""
    if used[:-1].all() or not used.any():
        return
    renumbered = np.arange(before + 1 + used.size, dtype=np.uint16)
    renumbered[before + 1 :] = before + np.cumsum(used)
    for first in range(0, of_node.size, _STEP):
        some = of_node[first : first + _STEP]
        some[some > before] = renumbered[some[some > before]]


def _values(labels: Pieces, of_node: NDArray[np.uint16], first: int) -> NDArray[Any] | None:
    """Of training nodes: values that occur, or columns from the rarest on; None: one class."""
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
        if values.size > MOST_CLASSES:
            return None
    if positive is None:
        return values
    return None if positive.size > MOST_CLASSES else np.argsort(positive, kind="stable")


def _flat(rows: NDArray[Any]) -> NDArray[Any]:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
