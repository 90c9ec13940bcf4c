"""One macro-batch in memory: its rows, and its nodes' columns with sources among its nodes.

Members are the nodes of some partitions, hubs, and the partitions' halos; each counts once.  Graph
blocks are filtered while they pass through buffers; rows are read to where they stay.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, PAGE_BYTES, Manifest, Relation, edge_layout
from blockstore.io.reader import make_transit
from blockstore.io.reading import Reading, wait_all
from blockstore.kernels import members as kernels
from blockstore.kernels.columns import view_blocks
from blockstore.kernels.members import MemberColumns, Members, WantedMembers
from blockstore.kernels.order import prefix_starts, stride_starts
from blockstore.kernels.picks import Column, Draws
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.rows import row_layout
from blockstore.store import Store
from loaderd.memory.ledger import ServedRows, first_items
from loaderd.memory.workspace import Carver, Workspace, WorkspaceFull
from loaderd.plans.base import Plan, Unit
from loaderd.plans.roots import Roots
from loaderd.sampling.macrobatch.blocks import block_runs, cut_blocks, cut_parts
from loaderd.sampling.macrobatch.copies import read_slots
from loaderd.sampling.macrobatch.files import (
    Bounds,
    HubBounds,
    MacroFiles,
    MacroRows,
    Pages,
    RelationBlocks,
    cut_runs,
)
from loaderd.sampling.rows import ServedFiles
from loaderd.sampling.structure import Drawn, Structure, sample_hops
from loaderd.sampling.topology import NO_ITEMS

_NO_FLAGS, _NO_SHIFTS = np.empty(0, np.uint8), np.empty(0, np.int64)
_ONE_SLOT = np.zeros(1, np.int32)  # of a block by itself
_NO_TABLE = np.empty(0, np.uint64)


class MacroChoice(NamedTuple):
    """The parts of a store that a session's macro-batches hold."""

    hubs: bool
    halos: bool
    beside: EdgeRecord  # sections kept of each edge


def held_record(relation: Relation, wanted: EdgeRecord) -> EdgeRecord:
    """The record kept of a relation's edges: those of the wanted sections that it has."""
    ids = ITEM_BYTES[relation.edge_id_dtype] // 4 if relation.edge_id_dtype else 0
    return EdgeRecord(
        ids * (wanted.ids > 0), wanted.weights * relation.has_weights,
        wanted.times * relation.has_times, wanted.items,
    )  # fmt: skip


class MacroArrays(NamedTuple):
    """The memory of one macro-batch."""

    rows: NDArray[np.uint8]  # page-aligned
    words: NDArray[np.uint64]
    take: list[NDArray[np.uint8]]  # per type, a flag for each copy
    columns: list[MemberColumns]
    addresses: list[NDArray[np.uint64]]  # per served array


def carve_macro(
    carver: Carver,
    manifest: Manifest,
    served: Sequence[ServedRows],
    bounds: Bounds,
    choice: MacroChoice,
) -> MacroArrays:
    """Cut the memory of a macro-batch out of a run of slots."""
    types = {t.name: i for i, t in enumerate(manifest.types)}
    array = carver.array
    rows = array(np.uint8, bounds.pages * PAGE_BYTES)
    words = array(np.uint64, kernels.words_size(manifest.num_nodes))
    take = [array(np.uint8, n) for n in bounds.copies]
    columns = []
    for relation, edges, blocks in zip(
        manifest.relations, bounds.edges, bounds.blocks, strict=True
    ):
        nodes = bounds.nodes[types[relation.dst]]
        own = held_record(relation, choice.beside)
        beside = array(np.uint32, edges * own.size)
        columns.append(
            MemberColumns(
                array(np.int64, nodes),
                array(np.uint32, nodes),
                array(np.dtype(manifest.id_dtype), edges),
                beside,
                beside.view(np.float32),
                own,
                edges,
                array(np.int64, 3 * blocks).reshape(-1, 3),
            )
        )
    addresses = [array(np.uint64, bounds.nodes[types[r.node_type.name]]) for r in served]
    return MacroArrays(rows, words, take, columns, addresses)


class MacroShared:
    """What all macro-batches of a session share: tables of slots, hubs, buffers to read through."""

    def __init__(
        self,
        store: Store,
        files: MacroFiles,
        rows: ServedFiles,
        transit: Sequence[NDArray[np.uint8]],
        slots: NDArray[np.uint8],
        hubs: NDArray[np.uint8],
        choice: MacroChoice,
    ) -> None:
        """Read the tables of slots, and the hubs.

        transit  page-aligned buffers, each as wide as a block at least
        slots    memory for `carve_slots`
        hubs     page-aligned memory for `bound_hubs`; empty without hubs

        Raises CorruptBlock, OSError.
        """
        manifest = store.manifest
        self.manifest, self.files, self.served = manifest, files, rows.served
        self.reader, self.data, self.choice = rows.reader, rows.data, choice
        self.layouts = [edge_layout(manifest, r) for r in manifest.relations]
        self.types = [files.type_of[r.node_type.name] for r in rows.served]
        self.transit = make_transit(transit)
        self.run_blocks = max(1, transit[0].size // manifest.block_bytes)
        self.first_items = first_items(manifest)
        items = choice.beside.items > 0
        self.slots = read_slots(store, files, self.reader, self.transit, slots, items)
        self._hubs = hubs
        self.hub_places: list[NDArray[np.int64]] = []
        self.hub_blocks: list[NDArray[np.uint8]] = []  # per relation (blocks, block_bytes)
        if choice.hubs:
            self._load_hubs()

    def _load_hubs(self) -> None:
        part, start = 2 * self.files.num_partitions, self.place_of(self._hubs)
        readings: list[Reading] = []
        used = 0
        for a in range(len(self.served)):
            pages = self.pages(a, part)
            self.hub_places.append(self.fetch_rows(a, part, pages, start + used, readings))
            used += pages.total * PAGE_BYTES
        block_bytes = self.manifest.block_bytes
        for copied in self.files.copied_columns:
            low, high = (0, 0) if copied is None else (int(copied.low[-1]), int(copied.high[-1]))
            size = (high - low) * block_bytes
            blocks = self._hubs[used : used + size].reshape(-1, block_bytes)
            if copied is not None:
                readings.append(self._fetch_blocks(copied.file, low, high, start + used))
            self.hub_blocks.append(blocks)
            used += size
        wait_all(readings)

    def _fetch_blocks(self, file: int, low: int, high: int, place: int) -> Reading:
        geometry, block_bytes = self.reader.files[file].geometry, self.manifest.block_bytes
        runs = block_runs(np.arange(low, high), geometry, 4)
        places = place + (runs[:, 3] - low) * block_bytes
        assert geometry.slot_bytes == block_bytes
        return self.reader.fetch(file, runs, places)

    def place_of(self, memory: NDArray[np.uint8]) -> int:
        """Byte of the arena at which a piece of it begins."""
        return memory.ctypes.data - self.data.ctypes.data

    def pages(self, a: int, part: int) -> Pages:
        none = np.empty(0, np.int64)
        number = self.served[a].number
        if part >= self.files.num_partitions and self.files.copied_rows[number] is None:
            return Pages(0, none, none)
        return self.files.pages(number, self.served[a].node_type.first, self.types[a], part)

    def rows(self, a: int, part: int) -> MacroRows:
        own, number = part < self.files.num_partitions, self.served[a].number
        rows = self.files.rows[number] if own else self.files.copied_rows[number]
        assert rows is not None
        return rows

    def fetch_rows(
        self, a: int, part: int, pages: Pages, place: int, readings: list[Reading]
    ) -> NDArray[np.int64]:
        """Begin to read a part's rows, shard after shard, to `place` and the bytes after it.

        Returns the place where byte 0 of each shard would lie.
        """
        places = np.empty(pages.counts.size, np.int64)
        for i, (first, count) in enumerate(zip(pages.first, pages.counts, strict=True)):
            runs = cut_runs(pages.shard + i, int(first), int(count))
            places[i] = place - int(first) * PAGE_BYTES
            to = places[i] + runs[:, 1] * PAGE_BYTES
            readings.append(self.reader.fetch(self.rows(a, part).file, runs, to))
            place += int(count) * PAGE_BYTES
        return places


def hub_bytes(manifest: Manifest, bounds: HubBounds) -> int:
    return bounds.pages * PAGE_BYTES + bounds.blocks * manifest.block_bytes


class MacroGraph:
    """One macro-batch.  Loaded by one thread at a time; then any may sample."""

    def __init__(self, shared: MacroShared, arrays: MacroArrays) -> None:
        self._shared, self._arrays = shared, arrays
        self._members = [
            Members(arrays.words, t.first, t.num_nodes, 0) for t in shared.manifest.types
        ]
        self.num_members = 0
        self._none = np.empty(0, np.dtype(shared.manifest.id_dtype))

    def load(self, partitions: NDArray[np.int64]) -> None:
        """Read it all.  Raises CorruptBlock, OSError."""
        copies = self._enter(partitions)
        readings: list[Reading] = []
        try:
            after = [
                self._filter(r, partitions, copies, readings)
                for r in range(len(self._shared.manifest.relations))
            ]
            self._place_rows(partitions, copies, readings)
            for step in after:
                step()  # hubs, while the others are read
        finally:  # nothing is written here any more once this has returned
            wait_all(readings)
        for columns in self._arrays.columns:
            kernels.join_fragments(columns)

    def _enter(self, partitions: NDArray[np.int64]) -> list["_Copies"]:
        """Enter the members; returns the copies that are used, hubs first."""
        shared, words = self._shared, self._arrays.words
        files, k = shared.files, shared.files.num_partitions
        words[:] = 0
        copies: list[_Copies] = []
        for t in range(len(files.offsets)):
            for p in partitions.tolist():
                kernels.add_range(words, *files.nodes_of(t, p))
        for t in range(len(files.offsets)):
            used = 0
            parts = [2 * k] * shared.choice.hubs
            parts += [k + p for p in partitions.tolist()] * shared.choice.halos
            for part in parts:
                low, high = files.nodes_of(t, part)
                take = self._arrays.take[t][used : used + high - low]
                nodes = shared.slots.nodes[t][low:high]
                kernels.take_new(words, nodes, take)
                wanted = WantedMembers(low, high, nodes, take, _NO_SHIFTS)
                copies.append(_Copies(part, t, wanted))
                used += high - low
        self.num_members = int(kernels.count_members(words))
        self._members = [
            m._replace(base=int(kernels.rank_of(words, m.first))) for m in self._members
        ]
        return copies

    def _place_rows(
        self, partitions: NDArray[np.int64], copies: Sequence["_Copies"], readings: list[Reading]
    ) -> None:
        shared = self._shared
        files, k = shared.files, shared.files.num_partitions
        place = shared.place_of(self._arrays.rows)
        for a, served in enumerate(shared.served):
            t = shared.types[a]
            for part in partitions.tolist():
                pages = shared.pages(a, part)
                places = shared.fetch_rows(a, part, pages, place, readings)
                place += pages.total * PAGE_BYTES
                low, high = files.nodes_of(t, part)
                one = np.array([low], self._none.dtype)
                first = served.node_type.first
                wanted = WantedMembers(low - first, high - first, one, _NO_FLAGS, _NO_SHIFTS)
                own = _Copies(part, t, wanted)
                self._address(a, own, True, pages, places)
            for copy in copies:
                pages = shared.pages(a, copy.part)
                if copy.node_type != t or not pages.counts.size:
                    continue
                if copy.part == 2 * k:
                    places = shared.hub_places[a]
                else:
                    places = shared.fetch_rows(a, copy.part, pages, place, readings)
                    place += pages.total * PAGE_BYTES
                self._address(a, copy, False, pages, places)

    def _address(
        self, a: int, copies: "_Copies", in_order: bool, pages: Pages, places: NDArray[np.int64]
    ) -> None:
        """Write the addresses of some members' rows."""
        rows = self._shared.rows(a, copies.part)
        layout = row_layout(rows.geometry, rows.array.row_bytes)
        kernels.address_group(
            copies.wanted, in_order, self._members[copies.node_type], layout, pages.shard, places,
            self._arrays.addresses[a],
        )  # fmt: skip

    def _filter(
        self,
        r: int,
        partitions: NDArray[np.int64],
        copies: Sequence["_Copies"],
        readings: list[Reading],
    ) -> Callable[[], None]:
        """Begin to read the blocks of a relation; returns what to do with hubs meanwhile."""
        shared, files = self._shared, self._shared.files
        relation, columns = shared.manifest.relations[r], self._arrays.columns[r]
        t, k = files.type_of[relation.dst], files.num_partitions
        columns.fragments[:] = -1
        columns.degrees[:] = 0
        own = [
            (WantedMembers(*files.nodes_of(t, p), self._none, _NO_FLAGS, _NO_SHIFTS), p)
            for p in partitions.tolist()
        ]
        at = self._read(r, files.columns[r], own, _Used(0, 0), readings)
        copied = files.copied_columns[r]
        if copied is None:
            return lambda: None
        shifts = shared.slots.shifts[r]
        mine = [
            (c.wanted._replace(shifts=shifts[c.wanted.low : c.wanted.high]), c.part - k)
            for c in copies
            if c.node_type == t
        ]
        at = self._read(r, copied, [m for m in mine if m[1] < k], at, readings)
        hubs = [m for m in mine if m[1] == k]
        return lambda: self._filter_hubs(r, copied, hubs, at) if hubs else None

    def _read(
        self,
        r: int,
        columns: RelationBlocks,
        wanted: Sequence[tuple[WantedMembers, int]],
        used: "_Used",
        readings: list[Reading],
    ) -> "_Used":
        """Stream the blocks in which wanted columns lie past the filter.

        wanted   with the row of their part in `columns`
        """
        shared = self._shared
        lists = [np.arange(columns.low[row], columns.high[row]) for _, row in wanted]
        if not lists:
            return used
        blocks = np.unique(np.concatenate(lists))
        places = _Places.lay_out(blocks, columns, used)
        geometry = shared.reader.files[columns.file].geometry
        spans = ((w.low, w.high, row) for w, row in wanted)
        cuts = cut_blocks(columns, spans, geometry.pages_per_block)
        runs = block_runs(blocks, geometry, shared.run_blocks, cuts)
        layout = shared.layouts[r]
        beside = shared.choice.beside
        taken = (True, beside.ids, beside.weights, beside.times)
        last = max(i for i in range(4) if taken[i] and layout.bits[i])
        parts = cut_parts(runs, columns, cuts, layout, last)
        size = shared.manifest.block_bytes

        held = runs[:, 2] // geometry.pages_per_block
        before = np.cumsum(held) - held  # blocks in runs before each

        def consume(low: int, high: int, data: NDArray[np.uint8]) -> None:
            own = blocks[before[low] : before[high - 1] + held[high - 1]]
            for j, block in enumerate(own.tolist()):
                self._filter_block(
                    r, columns, wanted, block, data[j * size : (j + 1) * size], places
                )

        readings.append(shared.reader.stream(columns.file, runs, shared.transit, consume, parts))
        return places.end

    def _filter_hubs(
        self,
        r: int,
        columns: RelationBlocks,
        wanted: Sequence[tuple[WantedMembers, int]],
        used: "_Used",
    ) -> None:
        low, high = int(columns.low[-1]), int(columns.high[-1])
        places = _Places.lay_out(np.arange(low, high), columns, used)
        for i, block in enumerate(self._shared.hub_blocks[r]):
            self._filter_block(r, columns, wanted, low + i, block, places)

    def _filter_block(
        self,
        r: int,
        columns: RelationBlocks,
        wanted: Sequence[tuple[WantedMembers, int]],
        block: int,
        data: NDArray[np.uint8],
        places: "_Places",
    ) -> None:
        """Keep what is wanted of a block that passes by.  Any thread may call."""
        shared, out = self._shared, self._arrays.columns[r]
        relation = shared.manifest.relations[r]
        members = self._members[shared.files.type_of[relation.dst]]
        i = int(np.searchsorted(places.blocks, block))
        to, first_node = int(places.starts[i]), int(columns.first_node[block])
        first_item = shared.first_items[r] + int(columns.first_edge[block])
        view = view_blocks(data, shared.layouts[r], _ONE_SLOT, _NO_TABLE, data.size, 0)
        for want, row in wanted:
            if columns.low[row] <= block < columns.high[row]:
                to = kernels.filter_block(
                    view, first_node, first_item, want, members, out, to, places.first_row + i
                )

    def sample(self, plan: Plan, unit: Unit, work: Workspace, roots: Roots) -> Structure:
        """Fill the workspace with the structure of the batch that begins at these roots.

        Raises WorkspaceFull.
        """
        return sample_hops(self._draw, plan, unit, work, roots)

    def _draw(self, column: Column, work: Workspace, then: Drawn) -> None:
        """Draws of one frontier over one relation, into `work.draws` at `work.starts`."""
        num, rule = column.nodes.size, column.rule
        if num == 0:
            return
        shared, columns = self._shared, self._arrays.columns[column.relation]
        dst = shared.manifest.relations[column.relation].dst
        members = self._members[shared.files.type_of[dst]]
        if 0 <= num * rule.fanout <= work.draws.size:
            stride_starts(num, rule.fanout, work.starts)
        elif rule.replace:
            raise WorkspaceFull
        else:
            kernels.member_degrees(members, columns.degrees, column)
            if rule.fanout >= 0:
                np.minimum(column.counts, rule.fanout, out=column.counts)
            if prefix_starts(column.counts, num, work.starts) > work.draws.size:
                raise WorkspaceFull
        draws = Draws(
            work.starts, work.draws, work.starts, work.record_draws, work.record, NO_ITEMS
        )
        kernels.draw_members(members, columns, column, draws)
        then(0, num)

    def address(self, nodes: NDArray[Any], a: int, out: NDArray[np.uint64]) -> None:
        """Addresses of members' rows; NO_ROW for nodes of another type."""
        members = self._members[self._shared.types[a]]
        kernels.address_members(members, nodes, self._arrays.addresses[a], out)


class _Copies(NamedTuple):
    """Rows of one type and part that belong to a macro-batch."""

    part: int
    node_type: int
    wanted: WantedMembers  # rows of the array; not taken: a member without this copy


class _Used(NamedTuple):
    """How far a relation's memory is used."""

    edges: int
    rows: int  # of fragments


class _Places(NamedTuple):
    """Places for what is kept of blocks."""

    blocks: NDArray[np.int64]
    starts: NDArray[np.int64]
    first_row: int
    end: _Used

    @classmethod
    def lay_out(cls, blocks: NDArray[np.int64], columns: RelationBlocks, used: _Used) -> "_Places":
        """One after the other, each with room for all edges of its block."""
        sizes = columns.first_edge[blocks + 1] - columns.first_edge[blocks]
        ends = used.edges + np.cumsum(sizes)
        end = _Used(int(ends[-1]) if ends.size else used.edges, used.rows + blocks.size)
        return cls(blocks, ends - sizes, used.rows, end)
