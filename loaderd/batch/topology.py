"""Neighbors of a frontier, drawn from graph blocks that are held in turn."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, Relation, giant_capacity
from blockstore.kernels.links import find_ends
from blockstore.kernels.locate import build_guide, choose_shift, locate_columns
from blockstore.kernels.order import (
    entries_of_blocks,
    order_by_block,
    prefix_starts,
    stride_starts,
)
from blockstore.kernels.sample import (
    column_degrees,
    column_edge_ids,
    column_items,
    fill_giant_edge_ids,
    fill_giants,
    giant_blocks,
    sample_columns,
)
from blockstore.kernels.temporal import find_times, rank_giants, sample_until
from blockstore.kernels.weighted import (
    fetch_giants,
    mark_picked_giants,
    mark_whole_giants,
    sample_weighted,
    weigh_giants,
)
from blockstore.store import Store
from loaderd.batch.structure import (
    IDENTITY,
    Column,
    Draws,
    Giants,
    HeldBlocks,
    Structure,
    sample_hops,
)
from loaderd.memory.ledger import first_items, has_edge_rows
from loaderd.memory.reservation import Account
from loaderd.memory.residency import Residency
from loaderd.memory.workspace import Tables, Workspace, WorkspaceFull
from loaderd.plans.base import Plan, Unit
from loaderd.plans.roots import Roots

_NO_ITEMS = np.empty(0, np.int64)


class RelationIndex(NamedTuple):
    """What stays in memory of one relation."""

    first: int  # store id of the first node of the dst type
    num_nodes: int
    first_node: NDArray[np.uint64]  # (num_blocks + 1,)
    guide: NDArray[np.uint32]
    shift: int
    num_blocks: int
    capacity: int  # edges of one column in a block of its own
    has_giants: bool  # a column may be longer
    edge_id_bytes: int  # 0: the blocks hold none
    weight_bytes: int  # likewise
    has_times: bool
    first_item: NDArray[np.int64]  # (num_blocks + 1,) item of each block's first edge, or (0,)

    def kept(self, tables: Tables) -> "RelationIndex":
        """The same with its arrays where the tables of the store are kept."""
        return self._replace(
            first_node=tables.keep(self.first_node), guide=tables.keep(self.guide),
            first_item=tables.keep(self.first_item),
        )  # fmt: skip


class Topology:
    """Samples from graph blocks, wherever the pool holds them."""

    def __init__(
        self,
        store: Store,
        residency: Residency,
        data: NDArray[np.uint8],
        slot_bytes: int,
    ) -> None:
        manifest = store.manifest
        self._residency, self._slot_bytes = residency, slot_bytes
        self._words = data.view(np.uint32)
        self._floats, self._longs = data.view(np.float32), data.view(np.int64)
        self._ids = data.view(np.dtype(manifest.id_dtype))
        self._id_bytes = ITEM_BYTES[manifest.id_dtype]
        self._edge_views = [
            data.view(np.dtype(r.edge_id_dtype or "uint32")) for r in manifest.relations
        ]
        self._block_bytes = manifest.block_bytes
        firsts = first_items(manifest)
        self.relations = [
            self._index(store, r, first)
            for r, first in zip(manifest.relations, firsts, strict=True)
        ]

    def load(self) -> None:
        """Bring all graph blocks into memory, as far as they have room: one pass in order.

        Where the whole graph stays, columns are found without a look at what is present.
        """
        for r in range(len(self.relations)):
            self._residency.load(r)

    def _index(self, store: Store, relation: Relation, item: int) -> RelationIndex:
        """`item`: of the relation's first edge."""
        dst = next(t for t in store.manifest.types if t.name == relation.dst)
        first_node = store.first_node(relation)
        shift = choose_shift(dst.num_nodes, relation.num_blocks)
        item_bytes = relation.item_bytes(store.manifest.id_dtype)
        return RelationIndex(
            dst.first,
            dst.num_nodes,
            first_node,
            build_guide(first_node, dst.first, dst.num_nodes, shift),
            shift,
            relation.num_blocks,
            giant_capacity(store.manifest.block_bytes, *item_bytes),
            bool((np.diff(first_node.astype(np.int64)) <= 1).any()),
            *item_bytes[1:3],
            relation.has_times,
            store.first_edge(relation).astype(np.int64) + item
            if has_edge_rows(store.manifest)
            else _NO_ITEMS,
        )

    def sample(self, plan: Plan, unit: Unit, work: Workspace, roots: Roots) -> Structure:
        """Fill the workspace with the structure of the batch that begins there.

        Raises WorkspaceFull: what was found is more than a small workspace holds; BatchFailed:
        fanout -1 finds more than there are edges; CorruptBlock, OSError.
        """
        return sample_hops(self._draw, plan, unit, work, roots)

    def find_edges(
        self,
        relation: int,
        first_edge: NDArray[np.uint64],
        index: NDArray[np.int64],
        timed: bool,
        held: HeldBlocks | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """(sources, targets, times) of edges by their place in the order of the blocks: store ids.

        first_edge  (num_blocks + 1,)  edges before each block
        index       places; they become edge ids, where there are any
        timed       whether times are wanted
        held        gives the blocks marked in a mask, in groups, each held in turn; None: a
                    worker's share at a time

        A block is held once, however many of the edges lie there.  Raises CorruptBlock, OSError.
        """
        info, num = self.relations[relation], index.size
        blocks = (np.searchsorted(first_edge, index.astype(np.uint64), "right") - 1).astype(
            np.int32
        )
        starts, order = np.empty(info.num_blocks + 1, np.int64), np.empty(num, np.uint32)
        order_by_block(blocks, num, starts, order)
        marks = (np.diff(starts) > 0).astype(np.uint8)
        entries, times = np.empty(num, np.uint32), np.empty(num * timed, np.int64)
        src, dst = np.empty(num, self._ids.dtype), np.empty(num, self._ids.dtype)
        for group in self._held_whole(relation, marks) if held is None else held(relation, marks):
            count = int(entries_of_blocks(order, starts, group, entries))
            if timed:
                find_times(
                    self._words, self._longs, entries, count, index, blocks, first_edge,
                    self._residency.pool.slot_of_block[relation], self._slot_bytes, self._id_bytes,
                    info.edge_id_bytes, info.weight_bytes, times,
                )  # fmt: skip
            find_ends(
                self._words, self._ids, self._edge_views[relation], info.edge_id_bytes, entries,
                count, index, blocks, first_edge, info.first_node,
                self._residency.pool.slot_of_block[relation], self._slot_bytes, self._id_bytes,
                src, dst, index,
            )  # fmt: skip
        return src, dst, times

    def _held_whole(self, relation: int, marks: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
        """Blocks marked in a mask, in groups held in turn; one where the relation is in memory."""
        if not self._residency.hold_file(relation):
            yield from self._held(relation, np.flatnonzero(marks))
            return
        try:
            yield np.flatnonzero(marks)
        finally:
            self._residency.drop_file(relation)

    def has_giants(self, column: Column) -> bool:
        """Whether a column of the relation may go on in further blocks."""
        return self.relations[column.relation].has_giants

    def locate(self, column: Column, blocks: NDArray[np.int32]) -> None:
        """The block in which each column starts, -1 for a node of another type."""
        index = self.relations[column.relation]
        locate_columns(
            column.nodes, column.num, index.first, index.num_nodes, index.first_node, index.guide,
            index.shift, blocks,
        )  # fmt: skip

    def count(
        self,
        column: Column,
        order: NDArray[np.uint32],
        low: int,
        high: int,
        blocks: NDArray[np.int32],
    ) -> None:
        """Degrees of entries order[low:high], whose blocks are held, into the column's counts."""
        index = self.relations[column.relation]
        column_degrees(
            self._words, column.nodes, order, low, high, blocks, index.first_node,
            self._slots(column), self._slot_bytes, self._id_bytes, index.capacity, column.counts,
        )  # fmt: skip

    def draw_held(
        self,
        column: Column,
        order: NDArray[np.uint32],
        low: int,
        high: int,
        blocks: NDArray[np.int32],
        draws: Draws,
        giants: Giants,
    ) -> None:
        """Draws of entries order[low:high], whose blocks are held; giants are appended."""
        index = self.relations[column.relation]
        if column.forest is not None:
            giants.count = sample_until(
                self._words, self._ids, self._edge_views[column.relation], self._longs,
                column.nodes, column.trees, column.forest.limits, column.forest.numbers, order, low,
                high, blocks, index.first_node, self._slots(column), self._slot_bytes,
                self._id_bytes, index.edge_id_bytes, index.weight_bytes, index.capacity,
                column.fanout, column.forest.last, column.key, draws.starts, draws.sources,
                draws.edge_starts, self._edge_draws(column, draws), self._items(column),
                column.counts, giants.entries, giants.degrees, giants.count,
            )  # fmt: skip
            return
        if column.weighted:
            giants.count = sample_weighted(
                self._words, self._ids, self._edge_views[column.relation], self._floats,
                column.nodes, order, low, high, blocks, index.first_node, self._slots(column),
                self._slot_bytes, self._id_bytes, index.edge_id_bytes, index.capacity,
                column.fanout, column.key, draws.starts, draws.sources, draws.edge_starts,
                self._edge_draws(column, draws), self._items(column), column.counts, giants.entries,
                giants.degrees, giants.count,
            )  # fmt: skip
            return
        giants.count = sample_columns(
            self._words, self._ids, column.nodes, order, low, high, blocks, index.first_node,
            self._slots(column), self._slot_bytes, self._id_bytes, index.capacity, column.fanout,
            column.replace, column.key, draws.starts, draws.sources, column.counts, giants.entries,
            giants.degrees, giants.count,
        )  # fmt: skip
        if draws.edge_ids is not None and column.items:
            column_items(
                self._words, column.nodes, order, low, high, blocks, index.first_node,
                index.first_item, self._slots(column), self._slot_bytes, index.capacity,
                column.fanout, column.replace, column.key, draws.edge_starts, draws.edge_ids,
            )  # fmt: skip
        elif draws.edge_ids is not None:
            column_edge_ids(
                self._words, self._edge_views[column.relation], column.nodes, order, low, high,
                blocks, index.first_node, self._slots(column), self._slot_bytes, self._id_bytes,
                index.capacity, column.fanout, column.replace, column.key, draws.edge_starts,
                draws.edge_ids,
            )  # fmt: skip

    def _items(self, column: Column) -> NDArray[np.int64]:
        """Item of each block's first edge; of size 0 where edges are told by their ids."""
        return self.relations[column.relation].first_item if column.items else _NO_ITEMS

    def _edge_draws(self, column: Column, draws: Draws) -> NDArray[Any]:
        """Where edge ids go; of size 0 where they are not asked for."""
        if draws.edge_ids is None:
            return self._edge_views[column.relation][:0]
        return draws.edge_ids

    def draw_giants(
        self,
        found: Sequence[tuple[Column, Giants, NDArray[np.int32], Draws]],
        held: Callable[[NDArray[np.uint8]], Iterator[NDArray[np.int64]]],
    ) -> None:
        """Draws of columns of one relation over several blocks: all that were found in a hop.

        found   of each frontier: its giants, the blocks its columns start in, where draws go
        held    gives the blocks marked in a mask, uint8 (num_blocks,), in groups, each held in turn

        Only blocks that are picked from are read; of a ranked draw, all of the columns before.
        """
        found = [f for f in found if f[1].count]
        if not found:
            return
        index = self.relations[found[0][0].relation]
        marks = np.zeros(index.num_blocks, np.uint8)
        for column, giants, blocks, _ in found:
            if column.ranked:
                giants.keys = np.empty(
                    (giants.count, max(1, column.fanout)),
                    np.float64 if column.weighted else np.int64,
                )
                giants.places = np.empty((giants.count, max(1, column.fanout)), np.int64)
                giants.found = np.zeros(giants.count, np.int64)
                mark_whole_giants(
                    giants.entries, giants.degrees, giants.count, blocks, index.capacity, marks
                )
            else:
                giant_blocks(
                    giants.entries, giants.degrees, giants.count, column.nodes, blocks,
                    index.capacity, column.fanout, column.replace, column.key, marks,
                )  # fmt: skip
        if found[0][0].ranked:
            for group in held(marks):
                self._weigh_giants(found, self._only(found[0][0], group))
            marks[:] = 0
            for _, giants, blocks, _ in found:
                for places, count in zip(giants.places, giants.found.tolist(), strict=True):
                    places[:count].sort()
                mark_picked_giants(
                    giants.entries, giants.count, blocks, index.capacity, giants.places,
                    giants.found, marks,
                )  # fmt: skip
        for group in held(marks):
            self._fetch_giants(found, self._only(found[0][0], group))

    def _only(self, column: Column, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slots of these blocks alone: others may be there, and leave at any time."""
        slots = np.full(self.relations[column.relation].num_blocks, -1, np.int32)
        slots[blocks] = self._slots(column)[blocks]
        return slots

    def _weigh_giants(
        self,
        found: Sequence[tuple[Column, Giants, NDArray[np.int32], Draws]],
        slots: NDArray[np.int32],
    ) -> None:
        for column, giants, blocks, _ in found:
            index = self.relations[column.relation]
            if column.forest is not None:
                rank_giants(
                    self._words, self._longs, giants.entries, giants.degrees, giants.count,
                    column.nodes, column.trees, column.forest.limits, column.forest.numbers, blocks,
                    slots, self._slot_bytes, self._id_bytes, index.edge_id_bytes,
                    index.weight_bytes, index.capacity, column.fanout, column.forest.last,
                    column.key, giants.keys, giants.places, giants.found,
                )  # fmt: skip
                continue
            weigh_giants(
                self._words, self._floats, giants.entries, giants.degrees, giants.count,
                column.nodes, blocks, slots, self._slot_bytes, self._id_bytes, index.edge_id_bytes,
                index.capacity, column.fanout, column.key, giants.keys, giants.places,
                giants.found,
            )  # fmt: skip

    def _fetch_giants(
        self,
        found: Sequence[tuple[Column, Giants, NDArray[np.int32], Draws]],
        slots: NDArray[np.int32],
    ) -> None:
        for column, giants, blocks, draws in found:
            index = self.relations[column.relation]
            view = self._edge_views[column.relation]
            if column.ranked:
                fetch_giants(
                    self._words, self._ids, view, giants.entries, giants.count, blocks, slots,
                    self._slot_bytes, self._id_bytes, index.edge_id_bytes, index.capacity,
                    giants.places, giants.found, draws.starts, draws.sources, draws.edge_starts,
                    self._edge_draws(column, draws), self._items(column), column.counts,
                )  # fmt: skip
                continue
            arguments = (
                giants.entries, giants.degrees, giants.count, column.nodes, blocks, slots,
                self._slot_bytes, self._id_bytes, index.capacity, column.fanout, column.replace,
                column.key,
            )  # fmt: skip
            fill_giants(self._words, self._ids, *arguments, draws.starts, draws.sources)
            if draws.edge_ids is not None and not column.items:
                fill_giant_edge_ids(
                    self._words, view, *arguments, draws.edge_starts, draws.edge_ids
                )

    def _draw(self, column: Column, work: Workspace, edge_ids: bool) -> None:
        """Draws of one frontier over one relation, into `work.draws` at `work.starts`."""
        if column.num == 0:
            return
        index = self.relations[column.relation]
        if index.num_blocks == 0:
            column.counts[:] = 0
            stride_starts(column.num, 0, work.starts)
            return
        self.locate(column, work.blocks)
        self._place(column, index, work)
        own = work.edge_draws if edge_ids else None
        draws = Draws(work.starts, work.draws, own, work.starts)
        giants = Giants(work.giants, work.giant_degrees)
        for order, low, high in self._groups(column, index, work):
            self.draw_held(column, order, low, high, work.blocks, draws, giants)
        self.draw_giants(
            [(column, giants, work.blocks, draws)],
            lambda marks: self._held(column.relation, np.flatnonzero(marks)),
        )

    def _slots(self, column: Column) -> NDArray[np.int32]:
        return self._residency.pool.slot_of_block[column.relation]

    def _place(self, column: Column, index: RelationIndex, work: Workspace) -> None:
        """Room for every column in `draws`.

        That takes a pass over the degrees with fanout -1, and where the columns cannot all have
        `fanout` edges: few of them do then.
        """
        room = column.num * column.fanout
        if 0 <= room <= work.draws.size:
            stride_starts(column.num, column.fanout, work.starts)
            return
        if column.replace:
            raise WorkspaceFull
        for order, low, high in self._groups(column, index, work):
            self.count(column, order, low, high, work.blocks)
        if column.fanout >= 0:
            np.minimum(column.counts, column.fanout, out=column.counts)
        total = prefix_starts(column.counts, column.num, work.starts)
        if total > work.draws.size:
            raise WorkspaceFull

    def _groups(
        self, column: Column, index: RelationIndex, work: Workspace
    ) -> Iterator[tuple[NDArray[np.uint32], int, int]]:
        """(order, low, high): entries whose head block is held while the caller works on them."""
        if self._residency.hold_file(column.relation):
            try:
                yield IDENTITY, 0, column.num
            finally:
                self._residency.drop_file(column.relation)
            return
        starts = work.block_starts[: index.num_blocks + 1]
        placed = order_by_block(work.blocks, column.num, starts, work.order)
        if placed < column.num:  # nodes of other types find nothing here
            column.counts[work.blocks[: column.num] < 0] = 0
        needed = np.flatnonzero(np.diff(starts)).astype(np.int64)
        for blocks in self._held(column.relation, needed):
            runs = np.searchsorted(needed, blocks)
            breaks = np.flatnonzero(np.diff(runs) != 1) + 1
            for run in np.split(blocks, breaks):
                yield work.order, int(starts[run[0]]), int(starts[run[-1] + 1])

    def _held(self, relation: int, needed: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """`needed` in groups of a worker's share, those in memory first, each held in turn."""
        here, share = self._residency.present(relation, needed), self._residency.worker_blocks
        for part in (needed[here], needed[~here]):
            for i in range(0, part.size, share):
                group = part[i : i + share]
                held = self._residency.hold(relation, group, account=Account.WORKER)
                try:
                    yield group
                finally:
                    self._residency.drop(held)
