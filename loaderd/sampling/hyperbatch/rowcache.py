"""Rows of a session: some regions stay whole, other rows come for a group of batches and leave."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.io.reader import make_transit
from blockstore.io.reading import Reading, ReadingQueue
from blockstore.kernels.order import distinct
from blockstore.kernels.rowcache import (
    FREE,
    LEVELS,
    NEVER,
    SOON,
    CacheTable,
    address_entries,
    choose_by_level,
    copy_extents,
    count_new,
    enter_rows,
    list_absent,
    list_passing,
    note_use,
    remove_rows,
)
from blockstore.kernels.rows import row_layout
from loaderd.memory.workspace import Carver
from loaderd.monitoring.devicecost import DeviceCost
from loaderd.monitoring.logs import log_event
from loaderd.sampling.hyperbatch.areas import AreaFull
from loaderd.sampling.hyperbatch.entries import (
    RUNS_HELD,
    CachedArray,
    CachedType,
    Needs,
    carve_chunks,
    carve_type,
)
from loaderd.sampling.hyperbatch.expected import ExpectedPages
from loaderd.sampling.hyperbatch.regions import (
    CacheShare,
    StayingMember,
    region_rows,
    region_shift,
    rows_by_type,
)
from loaderd.sampling.rows import ServedFiles

log = logging.getLogger(__name__)

_HALVE_EVERY = 8  # groups
_LISTED = 16  # the most of a batch's nodes that are listed once more: a 16th


class _Piece(NamedTuple):
    """Rows of regions that stay, read together."""

    regions: Sequence[int]  # of which all rows are read; or
    rows: NDArray[Any] = np.empty(0, np.uint32)  # these alone


class _BatchNodes(NamedTuple):
    pieces: Sequence[NDArray[Any]]  # of a batch
    nodes: list[Sequence[NDArray[Any]]]  # for each type: those of them whose rows may leave


class RowCache:
    """Entries for rows of a session.  Its gather thread brings rows in; workers look them up.

    Batches are numbered in a run.  A row that may leave stays until the batches that use it are
    released: `oldest` tells the first unreleased one.  A lock guards the hash tables of entries, in
    which slots move when rows leave.
    """

    def __init__(
        self,
        files: ServedFiles,
        shares: Sequence[CacheShare],
        tables: NDArray[np.uint8],
        area: Sequence[int],
        transit: Sequence[NDArray[np.uint8]],
        cost: DeviceCost,
        staying: StayingMember,
    ) -> None:
        """Bring nothing yet.

        shares    of each node type
        tables    uint8 (table_bytes,)
        area      arena slots for entries, `area_slots_of` them
        transit   buffers for runs of pages
        cost      cost of reading, by which runs of pages are planned
        staying   has the regions of `shares` that stay
        """
        self._reader, self._data, self._slot_bytes = files.reader, files.data, files.slot_bytes
        self._cost, self.expected = cost, ExpectedPages(files.reader)
        self._max_pages = min(b.size for b in transit) // PAGE_BYTES
        self._transit = make_transit(transit)
        carver, slots = Carver(tables), iter(area)
        ids = np.dtype(files.id_dtype)
        empty = np.iinfo(ids).max
        self.types: list[CachedType] = []
        self.stay_rows = self.stay_read = 0
        types = rows_by_type(files.served)
        self._staying, kept = staying.regions, staying.regions.kept()
        for number, (t, share) in enumerate(zip(types, shares, strict=True)):
            stays, lookup, node, last, coming, uses, bits, listed = carve_type(
                carver, t, share.entries, ids
            )
            lookup[:], node[:], last[:], uses[:] = FREE, empty, -1, 0
            stays[:] = kept[number]
            table = CacheTable(
                stays, np.int64(region_shift(t)), lookup, node, last, coming, uses, np.uint64(empty)
            )
            arrays = []
            for i, width in zip(t.served, t.row_bytes, strict=True):
                geometry = row_geometry(files.served[i].array, files.block_bytes)
                num_slots = -(-share.entries // (files.slot_bytes // width))
                own = np.fromiter((next(slots) for _ in range(num_slots)), np.int64, num_slots)
                arrays.append(
                    CachedArray(
                        files.first_file + files.served[i].number, row_layout(geometry, width), own
                    )
                )
            found = CachedType(
                number, t.first, t.num_nodes, region_rows(t), set[int](), arrays, list(t.served),
                table, bits, listed,
            )  # fmt: skip
            self.types.append(found)
            self._begin_regions(found, np.flatnonzero(stays))
        chosen, self._runs = carve_chunks(carver, types, shares)
        self._chosen = chosen.reshape(RUNS_HELD, -1)
        self._slots_lock = concurrency.Lock()  # for `CacheTable.slots`
        self._counts = np.zeros(LEVELS, np.int64)
        self._groups = 0
        self._entered = list[int]()  # batches whose rows are in the set, of the run
        self._noted = -1  # the last batch of the run that `coming` takes into account
        self._delivered = False  # whether a group's rows have been brought in
        self._passing: dict[int, _BatchNodes] = {}  # of each batch that is not brought in yet
        self.rows_read = self.rows_wanted = self.pages_read = self.runs_read = 0

    # -- groups -----------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Batches are numbered from 0 again; rows stay."""
        self._passing.clear()
        self._entered, self._noted = [], -1
        for t in self.types:
            t.table.last[:] = -1
            t.table.coming[:] = NEVER

    def end(self) -> None:
        """No batch is brought in any more; a thread that has read for one may keep the cache."""
        self.expected.forget()
        self._passing.clear()

    def age(self) -> None:
        """A group begins: every few groups, counts of uses are halved."""
        self._groups += 1
        if self._groups % _HALVE_EVERY == 0:
            for t in self.types:
                uses = t.table.uses
                uses >>= 1

    def count_fitting(self, batches: Sequence[Needs]) -> int:
        """How many of the batches, from the first on, fit together; 0: not even the first."""
        fits = self._enter(batches)
        return len(batches) if fits else len(self._entered) - 1

    def _fit(self, counts: Sequence[NDArray[np.int64]]) -> bool:
        """Whether there is an entry for each row that may leave."""
        return all(
            count[t.table.stays == 0].sum() <= t.table.node.size
            for t, count in zip(self.types, counts, strict=True)
        )

    def _enter(self, batches: Sequence[Needs]) -> bool:
        """Have the rows of these batches in the set, up to the first whose rows do not fit.

        Returns whether all fit.
        """
        for t in self.types:
            t.bits[:] = 0
        self._entered = []
        counts = [np.zeros(t.table.stays.size, np.int64) for t in self.types]
        for needs in batches:
            for t, count in zip(self.types, counts, strict=True):
                for piece in self._passing_of(needs)[t.number]:
                    count_new(piece, piece.size, t.first, t.num_nodes, t.bits, t.table.shift, count)
            self._entered.append(needs.batch)
            if not self._fit(counts):
                return False
        return True

    def bring(
        self, group: Sequence[Needs], later: Sequence[Needs], oldest: Callable[[int], int]
    ) -> None:
        """Bring in all rows of a group that fits; afterwards `address` finds them.

        Regions that other sessions have brought in since the last group are used from now on.

        later    batches known to follow, in order
        oldest   gives the first unreleased batch; asked with its last answer, waits for a later one

        Raises CorruptBlock, OSError, and what `oldest` raises.
        """
        until = group[-1].batch
        for needs in (*group, *later):  # before `listed` has the group's rows
            self._passing_of(needs)
        self.rows_wanted += sum(piece.size for needs in group for piece in needs.pieces)
        self._fill(group, oldest)
        if self._entered != [needs.batch for needs in group]:  # not those that were counted last
            fits = self._enter(group)
            assert fits  # `listed` has room for all of them
        # the others were noted while the last group was read; what this group uses stays anyway
        new = [needs for needs in later if needs.batch > self._noted]
        for t in self.types:
            t.num_listed = list_absent(t.bits, t.table, until, t.listed)
            self._note(t, new, t.table.coming, earliest=True)
        with self.expected.announced(self.types, later):
            for t in self.types:
                self._bring_type(t, group, later, oldest)
        self._noted = max((needs.batch for needs in later), default=until)
        self._delivered = True
        for batch in [batch for batch in self._passing if batch <= until]:
            del self._passing[batch]

    def _note(
        self, t: CachedType, batches: Sequence[Needs], uses: NDArray[np.int32], earliest: bool
    ) -> None:
        """Note the last of these batches that uses the row of an entry, or the earliest."""
        for needs in batches:
            for piece in self._passing_of(needs)[t.number]:
                note_use(
                    piece, piece.size, t.first, t.num_nodes, t.table, needs.batch, uses, earliest
                )

    def _passing_of(self, needs: Needs) -> list[Sequence[NDArray[Any]]]:
        """For each type, nodes of a batch that include all whose rows may leave.

        Most rows of a batch stay.  So they are left out once, not at each look at the batch.
        """
        known = self._passing.get(needs.batch)
        if known is None or [*map(id, known.pieces)] != [*map(id, needs.pieces)]:
            known = _BatchNodes(needs.pieces, [self._without_staying(t, needs) for t in self.types])
            self._passing[needs.batch] = known
        return known.nodes

    def _without_staying(self, t: CachedType, needs: Needs) -> Sequence[NDArray[Any]]:
        """All nodes if there is no room for fewer.  Uses the first part of `listed` meanwhile."""
        if needs.keep is None or not t.table.stays.any():
            return needs.pieces
        kept = list[NDArray[Any]]()
        for piece in needs.pieces:
            room = t.listed[: piece.size // _LISTED]
            count = list_passing(piece, piece.size, t.first, t.num_nodes, t.table, room)
            if count < 0:
                return needs.pieces
            try:
                kept.append(needs.keep(room[:count]))
            except AreaFull:
                return needs.pieces
        return kept

    def _begin_regions(self, t: CachedType, regions: NDArray[np.int64]) -> None:
        """These regions stay for this session, too."""
        t.table.stays[regions] = 1
        t.missing.update(regions.tolist())
        self.stay_rows += t.count(regions)
        self._note_there(t)

    def _note_there(self, t: CachedType) -> None:
        """Note which missing regions have been read meanwhile."""
        missing = np.array(sorted(t.missing), np.int64)
        unread = self._staying.unread(t.number, missing)
        self.stay_read += t.count(missing) - t.count(unread)
        t.missing.intersection_update(unread.tolist())

    def _fill(self, group: Sequence[Needs], oldest: Callable[[int], int]) -> None:
        """Bring in the regions that stay, once; if the run ends, some are left missing.

        A client waits for its first batch: if that is a group of its own, regions of which it wants
        little come with the next group, and now only the rows that it wants of them.
        """
        begun, later, chosen = concurrency.monotonic(), 0, list[tuple[list[int], NDArray[Any]]]()
        for t in self.types:
            self._begin_regions(t, self._staying.take_over(t.number, t.table.stays))
            now, rows = sorted(t.missing), t.listed[:0].copy()
            if not self._delivered and len(group) == 1:
                now, rows = self._choose_regions(t, group[0])
                later += t.count(t.missing.difference(now))
            chosen.append((now, rows))
        if missing := self.stay_rows - self.stay_read:
            log_event(log, logging.INFO, "row cache fills", rows=missing - later, later=later)
        for t, (now, rows) in zip(self.types, chosen, strict=True):
            self._bring_regions(t, np.array(now, np.int64), oldest)
            maximum = self._max_rows(t)
            pieces = [_Piece([], rows[i : i + maximum]) for i in range(0, rows.size, maximum)]
            self._bring_pieces(t, pieces, oldest)
        if missing:
            seconds = round(concurrency.monotonic() - begun, 2)
            log_event(log, logging.INFO, "row cache filled", rows=missing - later, seconds=seconds)

    def _max_rows(self, t: CachedType) -> int:
        """Most rows of a piece."""
        maximum: int = min(self._chosen.shape[1], t.listed.size // RUNS_HELD)
        return maximum

    def _bring_regions(
        self, t: CachedType, regions: NDArray[np.int64], oldest: Callable[[int], int]
    ) -> None:
        """Bring in all rows of these regions; other sessions may read some of them meanwhile."""
        step, missing = self._max_rows(t) >> int(t.table.shift), regions
        while missing.size:
            with self._staying.claimed(t.number, missing) as claimed:
                parts = [claimed[i : i + step].tolist() for i in range(0, claimed.size, step)]
                self._bring_pieces(t, [_Piece(part) for part in parts], oldest)
            missing = self._staying.wait(t.number, missing, lambda: oldest(-1))
        self._note_there(t)

    def _choose_regions(self, t: CachedType, needs: Needs) -> tuple[list[int], NDArray[Any]]:
        """The missing regions of which a batch wants much, and the rows that it wants of others.

        Little: reading these rows takes less than half as long as reading the region.
        """
        shift, run_pages = int(t.table.shift), self._cost.run_s / self._cost.page_s
        missing = np.zeros(t.table.stays.size, np.bool_)
        missing[list(t.missing)] = True
        found = [piece.astype(np.int64) - t.first for piece in needs.pieces]
        found = [rows[(rows >= 0) & (rows < t.num_nodes)] for rows in found]
        rows = distinct(np.concatenate([rows[missing[rows >> shift]] for rows in found]))
        rows = rows.astype(t.listed.dtype)
        cost, runs = np.zeros(missing.size), self._runs.reshape(-1, 5)  # cost, in reads of a page
        for low in range(0, rows.size, len(runs)):
            high = min(low + len(runs), rows.size)
            for a in t.arrays:
                count = self._cost.plan_runs(rows, low, high, a.layout, self._max_pages, runs)
                regions = rows[runs[:count, 3]] >> shift
                cost += np.bincount(regions, run_pages + runs[:count, 2], missing.size)
        blocks = [a.layout.block_bytes / a.layout.rows_per_block for a in t.arrays]
        much = 2 * cost >= sum(run_pages + (1 << shift) * each / PAGE_BYTES for each in blocks)
        return np.flatnonzero(missing & much).tolist(), rows[~much[rows >> shift]]

    def _bring_pieces(
        self, t: CachedType, pieces: Sequence[_Piece], oldest: Callable[[int], int]
    ) -> None:
        """Bring in rows of regions that stay, with two pieces in flight."""
        low = 0

        def arrived(piece: _Piece) -> None:
            self._staying.arrived(t.number, piece.regions)
            self._note_there(t)

        with ReadingQueue(RUNS_HELD) as queue:
            for piece in pieces:
                queue.make_room()
                oldest(-1)
                rows = np.concatenate([piece.rows, *map(t.rows_of, piece.regions)])
                t.listed[low : low + rows.size] = rows
                queue.add(self._read(t, low, low + rows.size, None), partial(arrived, piece))
                self.rows_read += rows.size
                low = t.listed.size // RUNS_HELD - low

    def _bring_type(
        self,
        t: CachedType,
        group: Sequence[Needs],
        later: Sequence[Needs],
        oldest: Callable[[int], int],
    ) -> None:
        """Bring in listed rows by chunks: make room, plan runs, read two chunks at a time."""
        now, until = group[0].batch, group[-1].batch
        low, known, turn = 0, oldest(-1), 0
        try:
            with ReadingQueue(RUNS_HELD) as queue:
                while low < t.num_listed:
                    queue.make_room()  # what was chosen for the chunk before the last is read
                    chosen = self._chosen[turn % RUNS_HELD][: t.num_listed - low]
                    found = self._choose(t, known, now, chosen)
                    few = max(1, self._chosen.shape[1] // 16)
                    if found < min(chosen.size, few) and known < now:
                        known = oldest(known)
                        continue
                    assert found, "a group that fits finds room once all before it are released"
                    with self._slots_lock:
                        enter_rows(t.listed, low, low + found, chosen, t.table, until)
                    low, turn = low + found, turn + 1
                    queue.add(self._read(t, low - found, low, chosen[:found]))
                    self.rows_read += found
                # while the last chunks come
                self._note(t, group, t.table.last, earliest=False)
                t.table.coming[:] = NEVER
                self._note(t, later, t.table.coming, earliest=True)
        except BaseException:
            # they are not known to be there
            with self._slots_lock:
                remove_rows(t.listed, low, t.table)
            raise

    def _choose(self, t: CachedType, oldest: int, now: int, out: NDArray[np.int64]) -> int:
        """Choose entries to replace, as many as `out` holds; returns how many were found.

        While batches before `now` are not released, rows that will come again soon stay, else they
        would be read again: those batches free the room of rows that nobody wants any more.  Rows
        that come again much later may leave: the disk does not idle for them.
        """
        levels = SOON if oldest < now else LEVELS
        return int(
            choose_by_level(t.table, oldest, now, t.hand, out.size, levels, self._counts, out)
        )

    def _read(
        self, t: CachedType, low: int, high: int, entries: NDArray[np.int64] | None
    ) -> list[Reading]:
        """Begin to read rows listed[low:high] of every array; entries None: they stay."""
        readings = []
        for number, a in enumerate(t.arrays):
            runs = self._runs.reshape(-1, 5)
            cost = self._cost.of_file(self._reader.files[a.file])
            count = cost.plan_runs(t.listed, low, high, a.layout, self._max_pages, runs)
            own = runs[:count].copy()
            self.pages_read += int(own[:, 2].sum())
            self.runs_read += count
            places, area = entries, a.area
            if places is None:
                staying = self._staying.entries(t.number, number)
                places, area = staying.of(t.listed[low:high], t.table.shift), staying.slots
            readings.append(
                self._reader.stream(
                    a.file,
                    own,
                    self._transit,
                    self._copier(t, a, own, (places, low, area)),
                    rows=t.listed[low:high],
                    # until regions are there, every session reads such rows one by one
                    urgent=entries is None,
                )
            )
        return readings

    def _copier(
        self,
        t: CachedType,
        a: CachedArray,
        runs: NDArray[np.int64],
        target: tuple[NDArray[np.int64], int, NDArray[np.int64]],
    ) -> Callable[[int, int, NDArray[np.uint8]], None]:
        """`target`: entries of the listed rows, the first of these, arena slots of the entries."""

        def copy(low: int, high: int, pages: NDArray[np.uint8]) -> None:
            copy_extents(
                pages, runs[low:high], t.listed, a.layout, *target, self._data, self._slot_bytes
            )
            self.expected.had(a.file, runs[low:high])

        return copy

    # -- looking up -------------------------------------------------------------------------------

    def address(self, served: int, nodes: NDArray[Any], out: NDArray[np.uint64]) -> None:
        """Arena byte offsets of nodes' rows of one served array, for a batch brought in."""
        for t in self.types:
            if served in t.served:
                array = t.served.index(served)
                a, cached = t.arrays[array], (t.table, self._staying.entries(t.number, array))
                with self._slots_lock:
                    address_entries(
                        nodes, nodes.size, t.first, t.num_nodes, cached, a.area, self._slot_bytes,
                        a.layout.row_bytes, out,
                    )  # fmt: skip
