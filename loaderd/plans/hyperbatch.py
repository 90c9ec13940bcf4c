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
    """Divide the blocks that a hop of all minibatches needs into groups, which are held in turn.

    needed    uint8 (num_blocks,)   not 0: at least one minibatch needs the block
    present   bool (num_blocks,)    in memory: these come first
    upward    direction of the others; hops alternate, so that what was read last is used first
    share     blocks of a group, at most

    Each is in one group; blocks of a group ascend.  An absent one is read once for all minibatches.
    """
    wanted = needed.astype(bool)
    groups: list[NDArray[np.int64]] = []
    for part in (np.flatnonzero(wanted & present), np.flatnonzero(wanted & ~present)):
        cut = [part[i : i + share] for i in range(0, part.size, share)]
        groups += cut if upward else cut[::-1]
    return groups


class RegionCurve(NamedTuple):
    """Regions of adjacent rows, of all node types, and how many rows minibatches want of each."""

    rows: NDArray[np.int64]  # (regions,)
    row_bytes: NDArray[np.int64]  # (regions,) memory that a row takes in all arrays
    widths: NDArray[np.int64]  # (arrays, regions) bytes of a row; 0: the type has fewer arrays
    wanted: NDArray[np.int64]  # (points, regions) distinct rows wanted by the first 1, 2, 4, ...
    kept: NDArray[np.bool_]  # (regions,) in memory anyway: it takes no room, and is not read again

    def grown(self, batches: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Distinct rows of each region that so many minibatches want.

        Between two points the curve is linear, after the last one a power law.

        batches   at least 1; several: (n,), for (n, regions)
        """
        wanted, last = self.wanted, len(self.wanted) - 1
        number = np.asarray(batches, np.float64)
        low = np.clip(np.frexp(number)[1] - 1, 0, max(0, last - 1))  # floor(log2(number))
        share = number / np.exp2(low) - 1
        upper = wanted[np.minimum(low + 1, last)]
        between = wanted[low] + share[..., np.newaxis] * (upper - wanted[low])
        # a share of the last point's batches, for each region
        number = number[..., np.newaxis] / (1 << last)
        power = np.ones(self.rows.size)
        if last > 0:
            growth = np.log2(np.maximum(1.0, wanted[last] / np.maximum(0.5, wanted[last - 1])))
            power = np.minimum(1.0, growth)
        found: NDArray[np.float64] = np.where(number < 1, between, wanted[last] * number**power)
        return np.minimum(found, self.rows)

    def reads(self, wanted: NDArray[np.float64], gap: int) -> NDArray[np.float64]:
        """(pages, runs) that bring the wanted rows of all regions but the first 0, 1, ...

        wanted   (..., regions)

        float64 (..., regions + 1, 2)
        """
        share = wanted / np.maximum(1, self.rows)
        ways = [region_pages(self.rows, width, share, gap) for width in self.widths]
        return np.stack([_sums_from(sum(each)) for each in zip(*ways, strict=True)], axis=-1)


class HyperbatchSize(NamedTuple):
    """How many minibatches are built together, and which regions stay in memory meanwhile."""

    batches: int
    stay: NDArray[np.int64]  # regions: those in memory anyway, then others, beginning with
    #   those whose rows are wanted most
    passing: NDArray[np.float64]  # (regions,) rows of the others that are in memory at a time
    room: float  # bytes for these


class RowMemory(NamedTuple):
    """The memory for rows, and what they take."""

    room: Callable[[int], int]  # bytes for rows beside the structures of so many minibatches
    entry_bytes: int  # of a row that does not stay, in addition to the row
    gap_pages: int  # most pages between wanted rows that are read with them
    best: Callable[[NDArray[Any], NDArray[Any]], int]  # best(pages, runs): index of the best way
    spare: float  # room for rows that pass, as a multiple of those that a hyperbatch wants
    begun: tuple[float, float] = (0.0, 0.0)  # pages, runs that a hyperbatch of any size reads
    idle_runs: int = 0  # that could be read while the disk idles between two hyperbatches
    alike: int = 1  # sessions with as much memory that share the regions that stay


_AMPLE = 8  # minibatches; more only if that saves reading
_GROUPS = 512  # of about equally hot regions, at least
_EXACT = 64  # estimates are rounded to so many steps per doubling
# In the search for the most past minibatches: a factor, then numbers between two of these.
_GROWTH, _BETWEEN = 1.25, 15
# Later batches want rows of regions that none of the tried ones wanted: rows that do not stay have
# at least this part of the room.
_MIN_PASSING = 64


def choose_size(
    curve: RegionCurve, memory: RowMemory, num_steps: int, asked: int = 0
) -> HyperbatchSize:
    """Choose the size with the least reading per minibatch, and the regions that stay.

    Rows of the other regions pass: those that the minibatches before wanted are in memory, and a
    hyperbatch reads the others that it wants.  In a larger hyperbatch more minibatches share the
    pages that are read, but their structures take memory from rows.  Regions that are in memory
    anyway stay; others do in the order of the share of their rows that is wanted.

    num_steps   minibatches of an epoch, at the beginning of which nothing is in memory
    asked       the size, reduced to what has room; 0: the best one
    """
    heat = curve.wanted[-1] / np.maximum(1, curve.rows)  # at most 1
    order = np.argsort(np.where(curve.kept, -2.0, -heat), kind="stable")
    alike, ordered = _grouped(curve, order)
    found: list[_Cut] = []
    for size in _sizes(min(asked or num_steps, num_steps)):
        cuts = _cuts(ordered, memory, size, num_steps)
        if not cuts:
            break
        if asked:
            found = cuts
        elif size <= _AMPLE:
            found = cuts + found
        else:
            found += cuts
    if not found:
        return HyperbatchSize(1, order[:0], curve.grown(1), 0.0)
    # of equals the first is taken
    best = found[memory.best(*_rounded(np.array([cut.reads for cut in found])).T)]
    passing, stay = curve.grown(best.past), order[alike < best.stay]
    passing[stay] = 0
    return HyperbatchSize(best.size, stay, passing, best.room)


def _rounded(reads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimates of pages and runs; those within a percent become equal."""
    rounded: NDArray[np.float64] = np.exp2(
        np.round(np.log2(np.maximum(1e-9, reads)) * _EXACT) / _EXACT
    )
    return rounded


def _grouped(curve: RegionCurve, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], RegionCurve]:
    """Group regions with equally wide rows that are wanted about equally often, the hottest first.

    order   regions by how often their rows are wanted

    Returns the number of the group of each region, in this order, and the curve of the groups.
    """
    unlike = np.vstack([curve.widths, curve.kept])
    widths, kind = np.unique(unlike[:, order], axis=1, return_inverse=True)
    heat = np.arange(order.size) * min(_GROUPS, order.size) // max(1, order.size)
    _, first, alike = np.unique(
        heat * widths.shape[1] + kind.ravel(), return_index=True, return_inverse=True
    )
    starts = order[first]
    rows, *wanted = (
        np.bincount(alike, values[order]).astype(np.int64) for values in (curve.rows, *curve.wanted)
    )
    return alike, RegionCurve(
        rows, curve.row_bytes[starts], curve.widths[:, starts], np.stack(wanted),
        curve.kept[starts],
    )  # fmt: skip


def _sizes(maximum: int) -> Iterator[int]:
    """Sizes that are tried, an eighth apart."""
    size = 1
    while size < maximum:
        yield size
        size = max(size + 1, size * 9 // 8)
    yield maximum


class _Cut(NamedTuple):
    size: int
    past: float  # minibatches whose rows are in memory when the next hyperbatch comes
    stay: int  # groups of regions that stay, the first ones
    room: float  # bytes for the rows of the others
    reads: NDArray[np.float64]  # pages, runs for a minibatch


def _cuts(curve: RegionCurve, memory: RowMemory, size: int, num_steps: int) -> list[_Cut]:
    """Ways to divide the room beside hyperbatches of this size; none if there is not enough.

    Either regions stay, or rows of the others pass more slowly; the slowest way comes first.
    """
    tried, past = list[float](), float(size)
    while not tried or tried[-1] + size < num_steps:
        tried.append(past)
        past *= _GROWTH
    found = _shares(curve, memory, size, np.array(tried), num_steps)
    if found and len(found) < len(tried):
        between = np.linspace(found[-1].past, tried[len(found)], _BETWEEN + 2)[1:-1]
        found += _shares(curve, memory, size, between, num_steps)
    return found[::-1]


def _shares(
    curve: RegionCurve, memory: RowMemory, size: int, past: NDArray[np.float64], num_steps: int
) -> list[_Cut]:
    """Choose the regions that stay beside the rows that `past` minibatches wanted of the others.

    As many stay as fit, except those that cost more to read once than the rows wanted of them.

    past   (n,) ascending

    Returns the ways for the first of these, up to one for which there is not enough room.
    """
    there = curve.grown(past)
    lacks = curve.grown(past + size) - there
    # a row that only one of these wants leaves after it, as all wanted rows are known
    again = np.maximum(0.0, there - lacks * past[:, np.newaxis] / size)
    held = np.maximum(memory.spare * curve.grown(size), again + lacks)
    # each of several sessions that are alike pays for a part of what stays
    paid = ~curve.kept if memory.alike == 1 else 1 / memory.alike
    stays = _sums(curve.rows * curve.row_bytes * paid)
    passes, others = (
        _sums_from(rows * (curve.row_bytes + memory.entry_bytes)) for rows in (held, curve.rows)
    )
    room = memory.room(size)
    passes = np.maximum(passes, np.minimum(others, room / _MIN_PASSING))
    useful = 1 + np.count_nonzero(curve.kept | (curve.wanted[-1] > 0))
    fits = (stays + passes)[:, :useful] <= room
    read, fill = (curve.reads(wanted, memory.gap_pages) for wanted in (lacks, again))
    fill[..., 0] += stays / PAGE_BYTES
    # a hyperbatch that reads nothing does not wait for the disk
    read[..., 1] += np.minimum(read[..., 1], memory.idle_runs)
    reads = (read + memory.begun) / size + fill / num_steps
    rounded, found = _rounded(reads), list[_Cut]()
    for i in range(past.size):
        counts = np.flatnonzero(fits[i])[::-1]
        if not counts.size:
            break
        count = int(counts[memory.best(*rounded[i, counts].T)])
        found.append(_Cut(size, float(past[i]), count, float(passes[i, count]), reads[i, count]))
    return found


def region_pages(
    rows: NDArray[Any], width: NDArray[Any] | int, wanted: NDArray[np.float64], gap: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(pages, runs) that bring a share of the rows of each region, by runs of pages.

    rows     (regions,) of each region
    width    bytes of a row
    wanted   (regions,) share of the rows
    gap      pages between two wanted ones that are read with them, at most

    A page has a wanted row with probability p.  It is left out if it lies in a gap of more than
    `gap` pages: the sum over gaps of length L of L p^2 (1 - p)^L, L > gap.
    """
    # rows that lie in a page at least in part
    touching = (PAGE_BYTES + width - np.gcd(PAGE_BYTES, np.maximum(1, width))) / np.maximum(
        1, width
    )
    p = 1 - (1 - wanted) ** touching
    pages = rows * width / PAGE_BYTES
    left_out = (1 - p) ** (gap + 1)
    return pages * (1 - left_out * (1 + gap * p)), pages * p * left_out


def _sums(values: NDArray[Any]) -> NDArray[Any]:
    """Sums of the first 0, 1, ... values, along the last axis."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)


def _sums_from(values: NDArray[Any]) -> NDArray[Any]:
    """Sums of all but the first 0, 1, ... values, likewise."""
    return _sums(values[..., ::-1])[..., ::-1]
