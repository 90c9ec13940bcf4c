"""Plan `hyperbatch`: the batches of `minibatch`, built many at a time, block by block (AGNES)."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES
from loaderd.plans.minibatch import MinibatchPlan


class HyperbatchPlan(MinibatchPlan):
    """Semantically `minibatch`: how many batches are built together changes no bit."""

    name = "hyperbatch"


def block_schedule(
    needed: NDArray[np.uint8], present: NDArray[np.bool_], upward: bool, share: int
) -> list[NDArray[np.int64]]:
    """In which groups the blocks that a hop of all minibatches needs are held, each block once.

    needed    uint8 (num_blocks,)   not 0: at least one minibatch needs the block
    present   bool (num_blocks,)    in memory: these come first
    upward    direction of the others; hops alternate, so that what was read last is used first
    share     blocks of a group, at most

    Blocks of a group ascend.  A block that is not in memory is read once for all minibatches.
    """
    wanted = needed.astype(bool)
    groups: list[NDArray[np.int64]] = []
    for part in (np.flatnonzero(wanted & present), np.flatnonzero(wanted & ~present)):
        cut = [part[i : i + share] for i in range(0, part.size, share)]
        groups += cut if upward else cut[::-1]
    return groups


class RegionCurve(NamedTuple):
    """Regions of adjacent rows, of all node types, and how much of each minibatches want."""

    rows: NDArray[np.int64]  # (regions,)
    row_bytes: NDArray[np.int64]  # (regions,) of a row in all arrays
    wanted: NDArray[np.int64]  # (points, regions) different rows of the first 1, 2, 4, ...

    def grown(self, batches: int) -> NDArray[np.float64]:
        """Different rows of each region that so many minibatches want.

        Between two points the curve is straight, after the last it goes on as a power.
        """
        wanted, last = self.wanted, len(self.wanted) - 1
        found: NDArray[np.float64]
        if batches < 1 << last:
            low = batches.bit_length() - 1
            share = batches / (1 << low) - 1
            found = wanted[low] + share * (wanted[low + 1] - wanted[low])
        elif last == 0:
            found = wanted[0] * float(batches)
        else:
            growth = np.log2(np.maximum(1.0, wanted[last] / np.maximum(0.5, wanted[last - 1])))
            found = wanted[last] * (batches / (1 << last)) ** np.minimum(1.0, growth)
        return np.minimum(found, self.rows)


class HyperbatchSize(NamedTuple):
    """How many minibatches are built together, and which regions stay in memory meanwhile."""

    batches: int
    stay: NDArray[np.int64]  # regions, those first whose rows are wanted most
    passing: NDArray[np.float64]  # (regions,) rows of the others that a hyperbatch wants
    room: float  # bytes for these


class RowMemory(NamedTuple):
    """What there is for rows, and what they take."""

    room: Callable[[int], int]  # bytes for rows beside the structures of so many minibatches
    entry_bytes: int  # of a row that does not stay, beside its own
    gap_pages: int  # between rows wanted that are read with them
    spare: float  # room for rows that pass, over what a hyperbatch wants of them
    read: int = 0  # bytes of the graph that are read for a hyperbatch of any size


_AMPLE = 8  # minibatches; more only if that saves reading
# Batches after those that were tried want rows of regions that none of these wanted: rows that do
# not stay have this part of the room, at least.
_LEAST_PASSING = 64


def choose_size(
    curve: RegionCurve, memory: RowMemory, num_steps: int, asked: int = 0
) -> HyperbatchSize:
    """The size with which the fewest bytes are read for a minibatch, and the regions that stay.

    A hyperbatch reads what it wants of the regions that do not stay, and holds that beside them.
    More minibatches read the same pages for more, but their structures take memory from regions.
    Regions stay in the order of the share of their rows that is wanted.

    num_steps   minibatches of an epoch, in which the regions that stay are read once
    asked       the size, or as much of it as has room; 0: as is best
    """
    order = np.argsort(-curve.wanted[-1] / np.maximum(1, curve.rows), kind="stable")
    ordered = RegionCurve(curve.rows[order], curve.row_bytes[order], curve.wanted[:, order])
    best, least = _Cut(1, 0, 0.0, 0.0), float("inf")
    for size in _sizes(min(asked or num_steps, num_steps)):
        cut = _cut(ordered, memory, size)
        if cut is None:
            break
        cost = 0.0 if asked else cut.read / size + cut.fill / num_steps
        if cost < least or (cost == least and (asked or size <= _AMPLE)):
            best, least = cut, cost
    passing = curve.grown(best.size)
    passing[order[: best.stay]] = 0
    return HyperbatchSize(best.size, order[: best.stay], passing, best.room)


def _sizes(most: int) -> Iterator[int]:
    """Sizes that are tried, an eighth apart."""
    size = 1
    while size < most:
        yield size
        size = max(size + 1, size * 9 // 8)
    yield most


class _Cut(NamedTuple):
    size: int
    stay: int  # regions that do, the first ones
    read: float  # bytes for a hyperbatch
    room: float  # bytes for the rows of the others
    fill: float = 0.0  # bytes of the regions that stay


def _cut(curve: RegionCurve, memory: RowMemory, size: int) -> _Cut | None:
    """As many regions as can stay with hyperbatches of this size; None: there is no room."""
    wanted, width = curve.grown(size), curve.row_bytes
    share = wanted / np.maximum(1, curve.rows)
    page = 1 - (1 - share) ** np.maximum(1, PAGE_BYTES / np.maximum(1, width))  # a page is wanted
    read = curve.rows * width * (1 - (1 - page) ** (memory.gap_pages + 1))
    stays = _sums(curve.rows * width)
    passes, others = (
        _sums((rows * (width + memory.entry_bytes))[::-1])[::-1] for rows in (wanted, curve.rows)
    )
    room = memory.room(size)
    passes = np.maximum(memory.spare * passes, np.minimum(others, room / _LEAST_PASSING))
    useful = 1 + np.count_nonzero(curve.wanted[-1])
    fitting = np.flatnonzero((stays + passes)[:useful] <= room)
    if not fitting.size:
        return None
    count = int(fitting[-1])
    return _Cut(
        size, count, memory.read + float(read[count:].sum()), float(passes[count]),
        float(stays[count]),
    )  # fmt: skip


def _sums(values: NDArray[Any]) -> NDArray[Any]:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate([[0], np.cumsum(values)])
