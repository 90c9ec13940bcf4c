"""Which rows stay, how batches form groups, and the place of each node of a batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.order import distinct
from loaderd.sampling.hyperbatch.rowcache import TypeRows
from loaderd.sampling.packed.format import NOWHERE

ABSENT = np.uint32(NOWHERE - 1)  # a node whose row neither stays nor is in the group
_PENDING = np.uint32(NOWHERE - 2)  # its row will be in the group
_STEP = 1 << 20  # nodes looked at together
MOST_WANTS = (1 << 16) - 1  # batches that want a node are counted up to here


def count_levels(wants: NDArray[np.uint16], t: TypeRows) -> NDArray[np.int64]:
    """How many nodes of a type are wanted by 0, 1, 2, ... batches, int64 (65536,)."""
    levels = np.zeros(1 << 16, np.int64)
    for first in range(t.first, t.first + t.num_nodes, _STEP):
        piece = wants[first : min(first + _STEP, t.first + t.num_nodes)]
        levels += np.bincount(piece, minlength=levels.size)
    return levels


class HotShare(NamedTuple):
    """Of a type those nodes stay that are wanted by more than `level` batches, and some by so many.

    These are the first of them, by their ids.
    """

    level: int
    some: int


def choose_hot(
    levels: Sequence[NDArray[np.int64]], row_bytes: Sequence[int], num_bytes: int
) -> list[HotShare]:
    """Of each type: the rows wanted most often for their bytes, as many as `num_bytes` hold.

    A row that a single batch wants is read once wherever it is.
    """
    shares = [HotShare((1 << 16) - 1, 0) for _ in levels]
    order = [
        (-level / width, number, int(level))
        for number, (counts, width) in enumerate(zip(levels, row_bytes, strict=True))
        for level in np.flatnonzero(counts)
        if level >= 2
    ]
    for _, number, level in sorted(order):
        count, width = int(levels[number][level]), row_bytes[number]
        taken = min(count, num_bytes // width)
        whole = taken == count
        shares[number] = HotShare(level - 1, 0) if whole else HotShare(level, taken)
        num_bytes -= taken * width
        if not whole:
            break
    return shares


def hot_nodes(wants: NDArray[np.uint16], t: TypeRows, share: HotShare) -> Iterator[NDArray[Any]]:
    """The nodes of a type that stay, ascending, in pieces of int64."""
    some = share.some
    for first in range(t.first, t.first + t.num_nodes, _STEP):
        piece = wants[first : min(first + _STEP, t.first + t.num_nodes)]
        chosen = piece > share.level
        ties = np.flatnonzero(piece == share.level)[:some]
        chosen[ties] = True
        some -= ties.size
        yield np.flatnonzero(chosen) + first


class Group(NamedTuple):
    """Consecutive batches and the nodes whose rows are theirs."""

    first: int  # batch
    stop: int
    nodes: NDArray[Any]  # store ids, ascending
    rows: tuple[int, ...]  # of each type


class Grouping:
    """Batches in order, put into groups whose rows fit a bound; a batch is in one group."""

    def __init__(
        self, num_nodes: int, types: Sequence[TypeRows], hot: NDArray[Any], group_bytes: int
    ) -> None:
        """Takes 4 bytes a node.

        hot   store ids of the rows that stay, ascending: place i is that of hot[i]
        """
        self._types, self._most = types, group_bytes
        self._widths = np.array([sum(t.row_bytes) for t in types], np.int64)
        self.place = np.full(num_nodes, NOWHERE, np.uint32)
        for t in types:
            self.place[t.first : t.first + t.num_nodes] = ABSENT
        self.place[hot] = np.arange(hot.size, dtype=np.uint32)
        self._hot = hot.size

    def groups(self, batches: int, nodes_of: Callable[[int], NDArray[Any]]) -> Iterator[Group]:
        """Until the next one is asked for, `place` has the places of a group's nodes."""
        listed: list[NDArray[Any]] = []
        first, rows = 0, np.zeros(len(self._types), np.int64)
        for batch in range(batches):
            fresh, more = self._fresh(nodes_of(batch))
            if batch > first and int((rows + more) @ self._widths) > self._most:
                yield from self._close(first, batch, listed)
                first, listed, rows = batch, [], np.zeros_like(rows)
                fresh, more = self._fresh(nodes_of(batch))
            self.place[fresh] = _PENDING
            listed.append(fresh)
            rows += more
        yield from self._close(first, batches, listed)

    def _fresh(self, nodes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Nodes that are not in the group yet, ascending, and how many there are of each type."""
        fresh = distinct(nodes[self.place[nodes] == ABSENT])
        return fresh, np.array(self._of_types(fresh), np.int64)

    def _of_types(self, nodes: NDArray[Any]) -> list[int]:
        bounds = [(t.first, t.first + t.num_nodes) for t in self._types]
        found = [np.searchsorted(nodes, np.array(b, np.uint64).astype(nodes.dtype)) for b in bounds]
        return [int(high - low) for low, high in found]

    def _close(self, first: int, stop: int, listed: list[NDArray[Any]]) -> Iterator[Group]:
        nodes = np.sort(np.concatenate(listed))
        self.place[nodes] = np.arange(self._hot, self._hot + nodes.size, dtype=np.uint32)
        yield Group(first, stop, nodes, tuple(self._of_types(nodes)))
        self.place[nodes] = ABSENT
