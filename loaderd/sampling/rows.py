"""Rows of a batch: addressed in place if their block stays, else copied to a row area."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import row_geometry
from blockstore.io.reader import BlockReader, Transit, make_transit
from blockstore.io.reading import Reading, ReadingQueue
from blockstore.kernels.order import distinct, missing_keys, only_blocks, order_by_block
from blockstore.kernels.rowcache import copy_extents
from blockstore.kernels.rows import (
    ABSENT,
    RowLayout,
    RowView,
    address_rows,
    mark_blocks,
    row_layout,
)
from loaderd.memory.blob import Written
from loaderd.memory.ledger import ServedRows
from loaderd.memory.residency import BlockPool, PinnedBlocks, Residency
from loaderd.memory.workspace import Workspace
from loaderd.monitoring.devicecost import FLASH, DeviceGauge

_PART_ROWS = 1 << 14  # rows whose pages are planned at a time
_PARTS_HELD = 2  # parts in flight at a time
_MOST = 16  # a batch of so many nodes for each block of a file wants nearly all of its blocks


class ServedFiles(NamedTuple):
    """Row arrays that come with batches, the reader of their files, and the arena they go to."""

    served: Sequence[ServedRows]
    reader: BlockReader
    first_file: int  # the array of this number is file `first_file + number` of the reader
    data: NDArray[np.uint8]  # the arena
    slot_bytes: int
    block_bytes: int
    id_dtype: str  # of the store ids by which rows are found


class RowFile(NamedTuple):
    """One served row array and where it lies."""

    number: int  # index among all row arrays of the store
    view: RowView
    layout: RowLayout
    num_blocks: int
    rows_per_slot: int


class Pins(NamedTuple):
    """What a batch holds in the row pool until its last group is released."""

    files: tuple[int, ...]
    held: tuple[PinnedBlocks, ...]


class Addressed(NamedTuple):
    """Result of `RowAssembler.address`: how many rows are not in place and must be copied."""

    pins: Pins
    num_missing: int  # nodes that miss a row in at least one array: order[:num_missing]
    missing_rows: tuple[int, ...]  # per array


def nothing_missing(served: Sequence[ServedRows]) -> Addressed:
    """The `Addressed` of a batch whose rows are all in the session's own memory."""
    return Addressed(Pins((), ()), 0, (0,) * len(served))


class RowAssembler:
    """Addresses rows; brings those that cannot stay through transit slots into row areas."""

    def __init__(
        self, files: ServedFiles, residency: Residency[BlockPool], gauge: DeviceGauge
    ) -> None:
        self._gauge = gauge
        self._residency, self._reader, self._data = residency, files.reader, files.data
        self._first_file, self._slot_bytes = files.first_file, files.slot_bytes
        self.files = []
        for rows, slots in zip(files.served, residency.pool.slot_of_block, strict=True):
            geometry = row_geometry(rows.array, files.block_bytes)
            t, row_bytes = rows.node_type, rows.array.row_bytes
            view = RowView(
                t.first, t.num_nodes, geometry.rows_per_block, row_bytes, slots, files.slot_bytes
            )
            layout, num_blocks = row_layout(geometry, row_bytes), geometry.num_blocks
            self.files.append(
                RowFile(rows.number, view, layout, num_blocks, files.slot_bytes // row_bytes)
            )

    def _served(self, work: Workspace) -> list[tuple[int, RowFile]]:
        """The arrays that the session is served from blocks, each with its place in `addresses`."""
        return [
            (a, self.files[rows.number]) for a, rows in enumerate(work.rows) if not rows.in_macro
        ]

    def _finest(self, work: Workspace) -> int:
        return min([f.view.rows_per_block for _, f in self._served(work)], default=1)

    def address(self, work: Workspace, num: int, min_age: int) -> Addressed:
        """Hold what can stay in memory and address it; put the rest in store order.

        num      nodes, and edges if they have rows: items[:num]
        min_age  batches since the last use of a block that may make room

        Afterwards addresses[a][i] is a place in the arena or ABSENT; of rows in macro-batches it is
        what it was.  Raises CorruptBlock, OSError.
        """
        self._residency.tick()
        files: list[int] = []
        held: list[PinnedBlocks] = []
        missing = [0] * len(work.rows)
        try:
            for a, file in self._served(work):
                items, view = work.items[:num], file.view
                pinned = self._residency.hold_file(file.number, num < _MOST * file.num_blocks)
                if pinned:
                    files.append(file.number)
                    missing[a] = address_rows(items, num, file.view, work.addresses[a])
                    items = items[work.addresses[a][:num] == ABSENT] if missing[a] else items[:0]
                if items.size:
                    held.append(own := self._hold(work, file, items, min_age))
                    if own.left_out.size and not pinned:  # they may come now, and leave at any time
                        view = view._replace(slots=only_blocks(view.slots, own.blocks))
                    missing[a] = address_rows(work.items, num, view, work.addresses[a])
        except BaseException:
            self.drop(Pins(tuple(files), tuple(held)))
            raise
        count = self._order(work, num) if any(missing) else 0
        return Addressed(Pins(tuple(files), tuple(held)), count, tuple(missing))

    def _hold(
        self, work: Workspace, file: RowFile, items: NDArray[Any], min_age: int
    ) -> PinnedBlocks:
        """Hold the blocks that have rows of these items, as far as they find a slot."""
        marks = work.marks[: file.num_blocks]
        mark_blocks(items, items.size, file.view, marks)
        needed = np.flatnonzero(marks).astype(np.int64)
        # if not all fit, those stay of which this batch wants the most rows
        needed = needed[np.argsort(255 - marks[needed], kind="stable")]
        marks[needed] = 0
        return self._residency.hold(file.number, needed, min_age)

    def drop(self, pins: Pins) -> None:
        """Unpin the batch's blocks."""
        for file in pins.files:
            self._residency.drop_file(file)
        for held in pins.held:
            self._residency.drop(held)

    def _order(self, work: Workspace, num: int) -> int:
        """Put the nodes that miss a row in store order, into `work.order`; returns their number.

        The key is the store id divided by the finest rows_per_block: different parts of the order
        want different blocks of every array.
        """
        keys = work.blocks[:num]
        keys[:] = -1
        finest = self._finest(work)
        for addresses in work.addresses:
            missing_keys(work.items, num, finest, addresses, keys)
        return int(order_by_block(work.blocks, num, work.block_starts, work.order))

    def in_place(self, work: Workspace, num: int) -> NDArray[np.uint32]:
        """Positions of the nodes that miss no row, uint32, ascending."""
        return np.flatnonzero(work.blocks[:num] < 0).astype(np.uint32)

    def stage(
        self,
        work: Workspace,
        low: int,
        high: int,
        area: Sequence[Sequence[int]],
        transit: NDArray[np.int64],
    ) -> int:
        """Bring the missing rows of nodes order[low:high] into the row area; returns rows copied.

        area     per array, slots with room for its rows
        transit  slots that pages pass through

        Raises CorruptBlock, OSError.
        """
        ends = [(slot * self._slot_bytes, (slot + 1) * self._slot_bytes) for slot in transit]
        passing, copied = make_transit([self._data[first:stop] for first, stop in ends]), 0
        for a, file in self._served(work):
            cursor, slots = 0, np.asarray(area[a], np.int64)
            with ReadingQueue(_PARTS_HELD) as queue:
                for part in self._parts(work, low, high):
                    queue.make_room()
                    positions, rows = self._missing(work, (a, file), part)
                    if rows.size:
                        queue.add([self._read(file, rows, slots, cursor, passing)])
                        places = np.arange(cursor, cursor + rows.size)
                        work.addresses[a][positions] = (
                            slots[places // file.rows_per_slot] * self._slot_bytes
                            + places % file.rows_per_slot * file.view.row_bytes
                        )
                        cursor += rows.size
            copied += cursor
        return copied

    def _parts(self, work: Workspace, low: int, high: int) -> Iterator[NDArray[np.uint32]]:
        """The entries order[low:high] in parts, which end between blocks if these are small."""
        while low < high:
            block = int(np.searchsorted(work.block_starts, low + _PART_ROWS, "right")) - 1
            stop = int(work.block_starts[block])
            stop = min(high, stop if stop > low else low + _PART_ROWS)
            yield work.order[low:stop]
            low = stop

    def _missing(
        self, work: Workspace, served: tuple[int, RowFile], entries: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The entries that miss their row in an array, sorted by row, and these rows."""
        a, file = served
        entries = entries[work.addresses[a][entries] == ABSENT]
        rows = work.items[entries].astype(np.int64) - file.view.first
        order = np.argsort(rows)
        return entries[order], rows[order]

    def _read(
        self,
        file: RowFile,
        rows: NDArray[np.int64],
        area: NDArray[np.int64],
        cursor: int,
        passing: Transit,
    ) -> Reading:
        """Begin to read the pages of rows, which ascend, and to copy each to its place."""
        number = self._first_file + file.number
        stored = self._reader.files[number]
        cost = (self._gauge.known or FLASH).of_file(stored)
        runs = np.empty((rows.size, 5), np.int64)
        runs = runs[: cost.plan_runs(rows, 0, rows.size, file.layout, passing.pages, runs)]

        def copy(low: int, high: int, pages: NDArray[np.uint8]) -> None:
            copy_extents(
                pages, runs[low:high], rows, file.layout, None, cursor, area, self._data,
                self._slot_bytes,
            )  # fmt: skip

        # of blocks that another server has, only wanted rows cross the network
        wanted = None if stored.holes is None else distinct(rows)
        return self._reader.stream(number, runs, passing, copy, rows=wanted)

    def group_arrays(
        self, work: Workspace, num: int, positions: NDArray[np.uint32] | None
    ) -> list[tuple[str, NDArray[Any] | Written]]:
        """Blob arrays of a group: of all nodes in order if `positions` is None."""
        if positions is None:
            return [
                (f"address:{rows.name}", work.addresses[a][:num])
                for a, rows in enumerate(work.rows)
            ]
        named: list[tuple[str, NDArray[Any] | Written]] = [("positions", positions)]
        for a, rows in enumerate(work.rows):
            named.append((f"address:{rows.name}", work.addresses[a][positions]))
        return named


assert ABSENT == 2**64 - 1
