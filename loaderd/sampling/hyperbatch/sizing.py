"""Divides a session's share of the arena for hyperbatches, by pure functions."""

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, PAGE_BYTES
from loaderd.memory.ledger import SessionNeed
from loaderd.monitoring.devicecost import FLASH, RUN_BYTES
from loaderd.plans.hyperbatch import HyperbatchSize, RegionCurve, RowMemory, choose_size
from loaderd.sampling.hyperbatch.entries import CHUNK_ROWS, entry_bytes, table_bytes
from loaderd.sampling.hyperbatch.regions import (
    CacheShare,
    TypeRows,
    area_slots_of,
    region_rows,
    rows_by_type,
)
from loaderd.sampling.rows import ServedFiles

_SLACK = 16  # an area has room for a sixteenth more than was counted
_CHUNKS = 8  # areas that hold a hyperbatch
_LOOK = 64  # part of the room for batches that are known beyond the next hyperbatch
_GAP_PAGES = 1  # most pages between wanted rows that are read with them, on flash
_IDLE_RUNS = 256  # runs that could be read while the disk idles between two hyperbatches
_MIN_POINTS = 2  # a cache is of use if it holds the rows of two minibatches
_PARTS = 64  # steps in which memory for rows is reduced until the tables have room, too
_UNSEEN = 64
# A hyperbatch's rows come while those of the last one are in use.  If the graph has no room
# either, most of the time goes to reading, and more batches together save more of it.
_SPARE, _SPARE_TOGETHER = 1.25, 1.0


class PassEstimate(NamedTuple):
    """Bytes that sampling takes if the graph is not in memory, but read in passes."""

    scratch: int  # of a pass, for a batch at each hop
    widest: int  # of a pass, for a batch at its widest hop
    min_scratch: int  # of the worst batch there may be, at its widest hop
    begun: int  # of a batch before its last hop
    early: int  # hyperbatches that are begun early, not bytes
    read: int  # for a hyperbatch

    def by_hops(self) -> "PassEstimate":
        """For a session that begins nothing early: a pass for each hop of a hyperbatch."""
        return self._replace(scratch=self.widest, early=0, read=self.read * (self.early + 1))


class Estimate(NamedTuple):
    """An estimate of an epoch, from its first minibatches."""

    num_steps: int  # minibatches of the epoch
    message_bytes: int  # of a minibatch's structure as it is handed over
    structure_bytes: int  # of the same, compact
    items: int  # of a minibatch, that may have rows
    min_area: int  # bytes for the largest structure possible
    wanted: tuple[NDArray[np.int64], ...]  # distinct rows of each region, of all node types in
    #   turn, that the first 1, 2, 4, ... want
    passes: PassEstimate | None = None  # None: the graph is in memory
    kept: NDArray[np.bool_] | None = None  # regions that stay for other sessions; None: none
    alike: int = 1  # sessions that share the regions that stay, this one included
    beyond: int = 0  # slots beside its own room, for regions that it keeps for the others
    first_area: int = 0  # bytes of the area in which the first batches were sampled already


class SamplingSlots(NamedTuple):
    """Slots of batches that are being sampled, if they are sampled together."""

    scratch: int = 0
    early: int = 0  # hyperbatches that are begun early, not slots
    begun: int = 0  # of each of these

    @property
    def slots(self) -> int:
        return self.scratch + self.early * self.begun


class HyperSizing(NamedTuple):
    """Slots, unless said otherwise."""

    size: int  # minibatches of a hyperbatch
    chunk: int  # of these, sampled into one area
    areas: int
    area: int  # contiguous, each
    sampling: SamplingSlots  # contiguous
    tables: int  # contiguous
    shares: tuple[CacheShare, ...]  # of each node type; empty: no cache
    staying: int  # for regions that stay from now on
    rows: int  # for rows that do not stay
    run: int  # contiguous, of each transit buffer
    quota: int

    def slots(self, readers: int) -> int:
        return (
            self.areas * self.area
            + self.sampling.slots
            + self.tables
            + self.staying
            + self.rows
            + self.run * readers
            + self.quota
        )


def size_hyperbatches(
    room: int,
    files: ServedFiles,
    need: SessionNeed,
    estimate: Estimate,
    readers: int,
    window: int,
    asked: int,
) -> HyperSizing | None:
    """Divide `room` slots; returns None if they do not suffice.

    asked   minibatches of a hyperbatch that the client wants, 0: as many as have room
    """
    slot_bytes, id_dtype = files.slot_bytes, files.id_dtype
    types, maximum = rows_by_type(files.served), asked or estimate.num_steps
    if not types:
        return cut_without_cache(room, slot_bytes, need, estimate, maximum)
    addresses = estimate.items * 8 * len(files.served)
    batch = -(-estimate.message_bytes // slot_bytes) + -(-addresses // slot_bytes)
    quota = max(need.min_quota, min(window * batch + 1, room // 4))
    run = -(-max(RUN_BYTES, PAGE_BYTES) // slot_bytes) if slot_bytes < RUN_BYTES else 1
    left = room - quota - run * readers
    # each piece that is rounded to slots may take one more than it fills
    spent = 2 * sum(len(t.row_bytes) for t in types) + 1
    fixed = table_bytes(
        types, id_dtype, [CacheShare(entries=min(CHUNK_ROWS, t.num_nodes)) for t in types]
    )

    def room_beside(size: int) -> int:
        areas = _size_areas(size, left, slot_bytes, estimate)
        return (left - areas.slots - spent) * slot_bytes - fixed

    spare, passed = _SPARE, 0
    if estimate.passes is not None:
        spare, passed = _SPARE_TOGETHER, estimate.passes.read
    extra = entry_bytes(ITEM_BYTES[id_dtype])
    begun = passed / PAGE_BYTES, passed / RUN_BYTES
    memory = RowMemory(
        room_beside, extra, _GAP_PAGES, FLASH.best_of, spare, begun, _IDLE_RUNS, estimate.alike
    )
    curve = region_curve(types, slot_bytes, estimate.wanted, estimate.kept)
    chosen = choose_size(curve, memory, estimate.num_steps, asked)
    areas = _size_areas(chosen.batches, left, slot_bytes, estimate)
    left -= areas.slots
    if left < 0:
        return cut_without_cache(room, slot_bytes, need, estimate, maximum)
    for part in range(_PARTS, 0, -1):
        num_bytes = left * slot_bytes * part // _PARTS
        shares, own = share_rows(
            types, slot_bytes, chosen, num_bytes, id_dtype, curve.kept, estimate.alike,
            estimate.beyond * slot_bytes,
        )  # fmt: skip
        tables = -(-table_bytes(types, id_dtype, shares) // slot_bytes)
        rows = area_slots_of(types, [share.entries for share in shares], slot_bytes)
        staying = area_slots_of(types, [share.stay_rows for share in shares], slot_bytes)
        paid = staying if estimate.alike == 1 else -(-own // slot_bytes)
        if tables + rows + paid <= left:
            break
    minimum = sum(int(wanted.sum()) for wanted in estimate.wanted[:_MIN_POINTS][-1:])
    minimum = min(minimum, sum(t.num_nodes for t in types)) - int(curve.rows[curve.kept].sum())
    if tables + rows + paid > left or sum(share.rows for share in shares) < minimum:
        return cut_without_cache(room, slot_bytes, need, estimate, maximum)
    return HyperSizing(
        chosen.batches, areas.chunk, areas.number, areas.area, areas.sampling, tables,
        tuple(shares), staying, rows, run, quota,
    )  # fmt: skip


class _Areas(NamedTuple):
    """Areas for the structures of hyperbatches; slots, unless said otherwise."""

    chunk: int  # minibatches sampled into one
    number: int
    area: int  # contiguous, each
    sampling: SamplingSlots

    @property
    def slots(self) -> int:
        return self.number * self.area + self.sampling.slots


def _size_areas(size: int, room: int, slot_bytes: int, estimate: Estimate) -> _Areas:
    """Areas for hyperbatches of `size` minibatches, out of `room` slots.

    One is handed out while the next is brought in; a third takes the room that the first leaves.
    If structures are small beside rows, more batches are known ahead: a row that one of them wants
    does not leave before those that none wants.
    """
    one, worst = _slack(estimate.structure_bytes), -(-estimate.min_area // slot_bytes)
    sampling = _size_sampling(size, slot_bytes, estimate.passes)
    if estimate.passes is not None:  # sampled together: an area holds all of them
        return _Areas(size, 2, max(worst, -(-size * one // slot_bytes)), sampling)
    # an area has room for the worst batch there may be: so it may hold several usual ones
    usual = worst * slot_bytes // max(1, one)
    chunk = max(-(-size // _CHUNKS), usual)
    area = max(worst, -(-chunk * one // slot_bytes))
    return _Areas(chunk, 2 * -(-size // chunk) + 1 + room // _LOOK // area, area, sampling)


def _size_sampling(size: int, slot_bytes: int, passes: PassEstimate | None) -> SamplingSlots:
    if passes is None:
        return SamplingSlots()
    scratch = -(-max(size * _slack(passes.scratch), passes.min_scratch) // slot_bytes)
    return SamplingSlots(scratch, passes.early, -(-size * _slack(passes.begun) // slot_bytes))


def _slack(num_bytes: int) -> int:
    return num_bytes * (_SLACK + 1) // _SLACK


def _row_bytes(t: TypeRows, slot_bytes: int) -> int:
    """Bytes of a row in all arrays, with its part of what slots leave unused."""
    return sum(-(-slot_bytes // (slot_bytes // width)) for width in t.row_bytes)


def region_curve(
    types: Sequence[TypeRows],
    slot_bytes: int,
    wanted: Sequence[NDArray[np.int64]],
    kept: NDArray[np.bool_] | None = None,
) -> RegionCurve:
    """The rows that minibatches want of each region, of all node types in turn."""
    counts = [region_rows(t) for t in types]
    regions = [rows.size for rows in counts]
    arrays = zip_longest(*(t.row_bytes for t in types), fillvalue=0)
    return RegionCurve(
        np.concatenate(counts), np.repeat([_row_bytes(t, slot_bytes) for t in types], regions),
        np.array([np.repeat(widths, regions) for widths in arrays]), np.stack(wanted),
        np.zeros(sum(regions), np.bool_) if kept is None else kept,
    )  # fmt: skip


def share_rows(
    types: Sequence[TypeRows],
    slot_bytes: int,
    chosen: HyperbatchSize,
    num_bytes: int,
    id_dtype: str,
    kept: NDArray[np.bool_],
    alike: int = 1,
    beyond: int = 0,
) -> tuple[list[CacheShare], int]:
    """Divide `num_bytes` among node types: regions that stay, and entries for the other rows.

    Of the chosen regions, the most wanted stay, as many as have room beside the rows that pass: a
    batch whose rows do not fit is read alone, block by block.

    kept     regions, of all node types in turn, that stay anyway, for other sessions
    alike    sessions that pay for the regions that stay, each an equal part
    beyond   bytes for what others will pay for: the first session keeps all regions, as its batches
             want them before the others are there

    Returns the share of each type, and the bytes of `num_bytes` that are paid for what stays.
    """
    counts, widths = [region_rows(t) for t in types], [_row_bytes(t, slot_bytes) for t in types]
    sizes = np.concatenate([rows * width for rows, width in zip(counts, widths, strict=True)])
    more = chosen.stay[~kept[chosen.stay]]
    taken = np.cumsum(sizes[more])
    own = maximum = num_bytes - int(chosen.room)
    if alike > 1:
        own = min(own, int(sizes[chosen.stay].sum()) // alike)
        maximum = min(alike * own - int(sizes[kept].sum()), own + beyond)
    count = int(np.searchsorted(taken, maximum, "right"))
    if alike == 1:
        own = int(taken[count - 1]) if count else 0
    left = num_bytes - own
    stays = np.isin(np.arange(sizes.size), more[:count])
    starts = np.cumsum([0, *(rows.size for rows in counts)])
    added = [stays[low:high] for low, high in pairwise(starts)]
    passes = [
        int(rows[~(stays | kept)[low:high]].sum())
        for rows, (low, high) in zip(counts, pairwise(starts), strict=True)
    ]
    # a type that the first batches did not want gets a little
    weights = [
        (float(chosen.passing[low:high].sum()) + others / _UNSEEN) * width
        for (low, high), others, width in zip(pairwise(starts), passes, widths, strict=True)
    ]
    total, extra = max(sum(weights), 1e-9), entry_bytes(ITEM_BYTES[id_dtype])
    shares = [
        CacheShare(
            np.flatnonzero(new), int(rows[new].sum()),
            min(others, int(left * weight / total) // (width + extra)),
        )
        for rows, new, others, weight, width in zip(
            counts, added, passes, weights, widths, strict=True
        )
    ]  # fmt: skip
    return shares, own


def cut_without_cache(
    room: int, slot_bytes: int, need: SessionNeed, estimate: Estimate, maximum: int
) -> HyperSizing | None:
    """If the rows of two minibatches have no room: only the graph is read for many together.

    Returns None if not even two can be sampled together, or the graph is in memory.
    """
    if (passes := estimate.passes) is None:
        return None
    quota = max(need.min_quota, room // 3)  # rows pass through it, part by part
    one = _slack(estimate.structure_bytes)
    # rather sample the first batches again than begin no hyperbatches early
    ways = (passes, estimate.first_area), (passes, 0), (passes.by_hops(), 0)
    for way, first_area in ways:
        each = one + _slack(way.scratch) + way.early * _slack(way.begun)
        most = min(maximum, max(0, room - quota) * slot_bytes // each)
        for size in range(most, 1, -1):
            area = -(-max(estimate.min_area, first_area, size * one) // slot_bytes)
            sampling = _size_sampling(size, slot_bytes, way)
            cut = HyperSizing(size, size, 1, area, sampling, 0, (), 0, 0, 0, quota)
            if cut.slots(0) <= room:
                return cut
    return None
