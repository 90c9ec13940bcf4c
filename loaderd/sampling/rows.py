"""Rows of a batch: addressed in place where their block stays, else copied to a row area."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import row_geometry
from blockstore.io.reader import BlockReader
from blockstore.kernels.order import mark_missing, missing_keys, order_by_block, stage_rows
from blockstore.kernels.rows import ABSENT, RowView, address_rows, mark_blocks
from loaderd.memory.blob import Written
from loaderd.memory.ledger import ServedRows
from loaderd.memory.residency import BlockPool, PinnedBlocks, Residency
from loaderd.memory.workspace import Workspace


class ServedFiles(NamedTuple):
    """Row arrays that come with batches, where their files are read, and the arena they go to."""

    served: Sequence[ServedRows]
    reader: BlockReader
    first_file: int  # the array of this number is file `first_file + number` of the reader
    data: NDArray[np.uint8]  # the arena
    slot_bytes: int
    block_bytes: int
    id_dtype: str  # of the store ids by which rows are found


class RowFile(NamedTuple):
    """One served row array and where it lies."""

    number: int  # among all of the store
    view: RowView
    num_blocks: int
    rows_per_slot: int


class Pins(NamedTuple):
    """What a batch holds in the row pool until its last group is released."""

    files: tuple[int, ...]
    held: tuple[PinnedBlocks, ...]


class Addressed(NamedTuple):
    """After `RowAssembler.address`: how many rows are in place and how many must pass through."""

    pins: Pins
    num_missing: int  # nodes that miss a row in at least one array; order[:num_missing] of them
    missing_rows: tuple[int, ...]  # per array


class RowAssembler:
    """Addresses rows; brings those that cannot stay through transit slots into row areas."""

    def __init__(self, files: ServedFiles, residency: Residency[BlockPool]) -> None:
        self._residency, self._reader, self._data = residency, files.reader, files.data
        self._first_file, slot_bytes = files.first_file, files.slot_bytes
        self.files = []
        for rows, slots in zip(files.served, residency.pool.slot_of_block, strict=True):
            geometry = row_geometry(rows.array, files.block_bytes)
            t, row_bytes = rows.node_type, rows.array.row_bytes
            view = RowView(
                t.first, t.num_nodes, geometry.rows_per_block, row_bytes, slots, slot_bytes
            )
            self.files.append(
                RowFile(rows.number, view, geometry.num_blocks, slot_bytes // row_bytes)
            )

    def _served(self, work: Workspace) -> list[tuple[int, RowFile]]:
        """What the workspace's session is served from blocks, and its place among `addresses`."""
        return [
            (a, self.files[rows.number]) for a, rows in enumerate(work.rows) if not rows.in_macro
        ]

    def _finest(self, work: Workspace) -> int:
        return min([f.view.rows_per_block for _, f in self._served(work)], default=1)

    def address(self, work: Workspace, num: int, min_age: int) -> Addressed:
        """Hold what can stay in memory and address it; put the rest in store order.

        num      nodes, and edges where these have rows: items[:num]
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
                if self._residency.hold_file(file.number):
                    files.append(file.number)
                else:
                    marks = work.marks[: file.num_blocks]
                    mark_blocks(work.items, num, file.view, marks)
                    needed = np.flatnonzero(marks).astype(np.int64)
                    marks[needed] = 0
                    held.append(self._residency.hold(file.number, needed, min_age))
                missing[a] = address_rows(work.items, num, file.view, work.addresses[a])
        except BaseException:
            self.drop(Pins(tuple(files), tuple(held)))
            raise
        count = self._order(work, num) if any(missing) else 0
        return Addressed(Pins(tuple(files), tuple(held)), count, tuple(missing))

    def drop(self, pins: Pins) -> None:
        """Let the pool have the batch's blocks again."""
        for file in pins.files:
            self._residency.drop_file(file)
        for held in pins.held:
            self._residency.drop(held)

    def _order(self, work: Workspace, num: int) -> int:
        """Put the nodes that miss a row in store order, into `work.order`; returns their number.

        The key is the store id divided by the finest rows_per_block, so that blocks of every array
        ascend along the order.
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
        transit  slots that blocks pass through

        Raises CorruptBlock, OSError.
        """
        copied = 0
        for a, file in self._served(work):
            marks = work.marks[: file.num_blocks]
            mark_missing(work.items, work.order, low, high, file.view, work.addresses[a], marks)
            needed = np.flatnonzero(marks).astype(np.int64)
            marks[needed] = 0
            slots = np.asarray(area[a], np.int64)
            cursor = 0
            for i in range(0, needed.size, transit.size):
                blocks = needed[i : i + transit.size]
                cursor = self._stage_blocks(
                    work, (a, file), blocks, transit, (low, high), slots, cursor
                )
            copied += cursor
        return copied

    def _stage_blocks(
        self,
        work: Workspace,
        served: tuple[int, RowFile],
        blocks: NDArray[np.int64],
        transit: NDArray[np.int64],
        bounds: tuple[int, int],
        area: NDArray[np.int64],
        cursor: int,
    ) -> int:
        (a, file), slots = served, transit[: blocks.size]
        wanted, view = None, file.view
        if self._reader.files[self._first_file + file.number].holes is not None:
            # of blocks that another server has only rows that are wanted cross the network
            items = work.items[work.order[bounds[0] : bounds[1]]].astype(np.int64)
            wanted = np.unique(items) - view.first
            wanted = wanted[(wanted >= 0) & (wanted < view.num_nodes)]
        self._reader.read(self._first_file + file.number, blocks, slots, wanted)
        where = work.transit[: file.num_blocks]
        where[blocks] = slots
        finest = self._finest(work)
        first = (view.first + int(blocks[0]) * view.rows_per_block) // finest
        last = (view.first + (int(blocks[-1]) + 1) * view.rows_per_block - 1) // finest
        last = min(last, work.block_starts.size - 2)
        low = max(bounds[0], int(work.block_starts[first]))
        high = min(bounds[1], int(work.block_starts[last + 1]))
        rows: int = stage_rows(
            self._data, work.items, work.order, low, high, view._replace(slots=where),
            work.addresses[a], area, cursor,
        )  # fmt: skip
        where[blocks] = -1
        return rows

    def group_arrays(
        self, work: Workspace, num: int, positions: NDArray[np.uint32] | None
    ) -> list[tuple[str, NDArray[Any] | Written]]:
        """Blob arrays of a group: all nodes in order where `positions` is None."""
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
