"""Draws neighbors of a frontier from graph blocks that are held in turn."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Relation, edge_layout
from blockstore.kernels.columns import BlockView, view_blocks
from blockstore.kernels.induced import ChosenNodes, keep_columns, keep_parts
from blockstore.kernels.links import find_ends
from blockstore.kernels.locate import build_guide, choose_shift, hide_outside, locate_columns
from blockstore.kernels.order import (
    entries_of_blocks,
    only_blocks,
    order_by_block,
    prefix_starts,
    stride_starts,
)
from blockstore.kernels.picks import BY_SOURCE, UNIFORM, Column, Draws
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.sample import (
    MultiBlockColumns,
    Picks,
    column_degrees,
    draw_columns,
    fetch_multi_block,
    make_picks,
    mark_multi_block,
    pick_multi_block,
    rank_multi_block,
    rank_seams,
)
from blockstore.store import Store
from loaderd.memory.ledger import first_items, has_edge_rows
from loaderd.memory.residency import Account, GraphPool, Residency
from loaderd.memory.workspace import StoreTables, Workspace, WorkspaceFull
from loaderd.plans.base import Plan, Unit
from loaderd.plans.roots import Roots
from loaderd.sampling.steps import Helpers, NoHelpers
from loaderd.sampling.structure import (
    IDENTITY,
    Drawn,
    HeldBlocks,
    Structure,
    nothing,
    sample_hops,
)

NO_ITEMS = np.empty(0, np.int64)
_PIECE, _PIECES = 4096, 16  # fewest nodes in a frontier's piece; most pieces


class RelationIndex(NamedTuple):
    """The tables of one relation that stay in memory."""

    first: int  # store id of the first node of the dst type
    num_nodes: int
    view: BlockView
    guide: NDArray[np.uint32]
    shift: int
    num_blocks: int
    has_multi_block: bool  # a column may go on in further blocks
    first_item: NDArray[np.int64]  # (num_blocks + 1,) item of each block's first edge, or (0,)

    def kept(self, tables: StoreTables) -> "RelationIndex":
        """The same with its arrays where the tables of the store are kept."""
        return self._replace(
            view=self.view._replace(first_node=tables.keep(self.view.first_node)),
            guide=tables.keep(self.guide), first_item=tables.keep(self.first_item),
        )  # fmt: skip


class MultiBlockDraws(NamedTuple):
    """Columns of a frontier that span several blocks."""

    column: Column
    blocks: NDArray[np.int32]  # in which the frontier's columns start
    draws: Draws
    multi_block: MultiBlockColumns


class Topology:
    """Samples from graph blocks, wherever the pool holds them."""

    def __init__(
        self,
        store: Store,
        residency: Residency[GraphPool],
        data: NDArray[np.uint8],
        slot_bytes: int,
    ) -> None:
        manifest = store.manifest
        self.residency, self._data, self._slot_bytes = residency, data, slot_bytes
        self.helpers: Helpers = NoHelpers()  # threads that may share the work of a frontier
        self._inner = NO_ITEMS  # ranges of nodes that have columns; none: all have
        self.id_dtype = np.dtype(manifest.id_dtype)
        firsts = first_items(manifest)
        self.relations = [
            self._index(store, r, relation, first)
            for r, (relation, first) in enumerate(zip(manifest.relations, firsts, strict=True))
        ]

    def within(self, inner: NDArray[np.int64]) -> "Topology":
        """The same graph, in which only the nodes of some ranges have columns.

        inner   int64 (2 n,) ascending store ids: first and stop of each range
        """
        found = copy(self)
        found._inner = inner
        return found

    def load(self) -> None:
        """Bring all graph blocks into memory, as far as they have room: one pass in order.

        If the whole graph stays, columns are found without checking which blocks are present.
        """
        for r in range(len(self.relations)):
            self.residency.load(r)

    def _index(self, store: Store, r: int, relation: Relation, item: int) -> RelationIndex:
        """`item`: of the relation's first edge."""
        manifest = store.manifest
        dst = next(t for t in manifest.types if t.name == relation.dst)
        first_node = store.first_node(relation)
        shift = choose_shift(dst.num_nodes, relation.num_blocks)
        layout = edge_layout(manifest, relation)
        view = view_blocks(
            self._data, layout, self.residency.pool.slot_of_block[r], first_node, self._slot_bytes,
            layout.capacity(manifest.block_bytes),
        )  # fmt: skip
        return RelationIndex(
            dst.first,
            dst.num_nodes,
            view,
            build_guide(first_node, dst.first, dst.num_nodes, shift),
            shift,
            relation.num_blocks,
            bool((np.diff(first_node.astype(np.int64)) <= 1).any()),
            store.first_edge(relation).astype(np.int64) + item
            if has_edge_rows(manifest)
            else NO_ITEMS,
        )

    def sample(self, plan: Plan, unit: Unit, work: Workspace, roots: Roots) -> Structure:
        """Fill the workspace with the structure of the batch that begins at these roots.

        Raises WorkspaceFull: the batch is larger than a small workspace holds; BatchFailed:
        fanout -1 finds more than there are edges; CorruptBlock, OSError.
        """
        return sample_hops(self.draw, plan, unit, work, roots)

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
        index       places; they become edge ids, if there are any
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
        src, dst = (np.empty(num, self.id_dtype) for _ in range(2))
        for group in self._held_whole(relation, marks) if held is None else held(relation, marks):
            count = int(entries_of_blocks(order, starts, group, entries))
            find_ends(info.view, entries[:count], blocks, first_edge, src, dst, index, times)
        return src, dst, times

    def _held_whole(self, relation: int, marks: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
        """Blocks marked in a mask, in groups held in turn; in one if the relation is in memory."""
        if not self.residency.hold_file(relation):
            yield from self._held(relation, np.flatnonzero(marks))
            return
        try:
            yield np.flatnonzero(marks)
        finally:
            self.residency.drop_file(relation)

    def locate(self, column: Column, blocks: NDArray[np.int32]) -> None:
        """The block in which each column starts, -1 for a node of another type, or outside."""
        index = self.relations[column.relation]
        locate_columns(
            column.nodes, column.nodes.size, index.first, index.num_nodes, index.view.first_node,
            index.guide, index.shift, blocks,
        )  # fmt: skip
        if self._inner.size:
            hide_outside(column.nodes, column.nodes.size, self._inner, blocks)

    def draws(
        self,
        column: Column,
        starts: NDArray[np.int64],
        sources: NDArray[Any],
        edge_starts: NDArray[np.int64],
        records: NDArray[np.uint32],
        record: EdgeRecord,
    ) -> Draws:
        """Destination of a frontier's picks; `records` of size 0: nothing comes with the edges."""
        items = self.relations[column.relation].first_item if record.items else NO_ITEMS
        return Draws(starts, sources, edge_starts, records, record, items)

    def draw_multi_block(
        self,
        found: Sequence[MultiBlockDraws],
        held: Callable[[NDArray[np.uint8]], Iterator[NDArray[np.int64]]],
    ) -> None:
        """Draw from columns of one relation over several blocks: all that were found in a hop.

        held    gives the blocks marked in a mask, uint8 (num_blocks,), in groups, each held in turn

        Only blocks that are picked from are read; a ranked draw first reads all of the columns.
        """
        found = [f for f in found if f.multi_block.entries.size]
        if not found:
            return
        relation = found[0].column.relation
        capacity = self.relations[relation].view.capacity
        picks = [make_picks(f.column.rule, f.multi_block, capacity) for f in found]
        ranked: list[tuple[MultiBlockDraws, Picks]] = []
        for f, own in zip(found, picks, strict=True):  # maybe of several hops, each with its rule
            if f.column.rule.kind == UNIFORM:
                pick_multi_block(f.column, f.multi_block, own)
            else:
                ranked.append((f, own))
        if ranked:
            marks = self._mark([f for f, _ in ranked], [own for _, own in ranked])
            for _, own in ranked:
                own.found[:] = 0
            for group in held(marks):
                view = self._only(relation, group)
                for f, own in ranked:
                    rank_multi_block(view, f.column, f.blocks, f.multi_block, own)
            for f, own in ranked:
                if f.column.rule.kind == BY_SOURCE:
                    rank_seams(capacity, f.column, f.multi_block, own)
                for positions, count in zip(own.positions, own.found.tolist(), strict=True):
                    positions[:count].sort()
        for group in held(self._mark(found, picks)):
            view = self._only(relation, group)
            for f, own in zip(found, picks, strict=True):
                fetch_multi_block(view, f.column, f.blocks, f.draws, f.multi_block, own)

    def _mark(self, found: Sequence[MultiBlockDraws], picks: Sequence[Picks]) -> NDArray[np.uint8]:
        """Mask of the blocks that picks lie in, uint8 (num_blocks,)."""
        index = self.relations[found[0].column.relation]
        marks = np.zeros(index.num_blocks, np.uint8)
        for f, own in zip(found, picks, strict=True):
            mark_multi_block(index.view.capacity, f.blocks, f.multi_block, own, marks)
        return marks

    def _only(self, relation: int, blocks: NDArray[np.int64]) -> BlockView:
        view = self.relations[relation].view
        return view._replace(slots=only_blocks(view.slots, blocks))

    def draw(self, column: Column, work: Workspace, then: Drawn = nothing) -> None:
        """Draw for one frontier over one relation, into `work.draws` at `work.starts`.

        then    called, in order, with the ranges of the frontier that are drawn
        """
        num = column.nodes.size
        if num == 0:
            return
        index = self.relations[column.relation]
        if index.num_blocks == 0:
            column.counts[:] = 0
            stride_starts(num, 0, work.starts)
            then(0, num)
        elif self.residency.hold_file(column.relation):
            try:
                self._draw_shared(column, index, work, then)
            finally:
                self.residency.drop_file(column.relation)
        else:
            self.locate(column, work.blocks)
            if not self._has_stride(column, work):
                self._count(column, index, work)
            self._place(column, work)
            groups = self._groups(column, index, work)
            self._draw_groups(column, index, work, (0, num), groups)
            then(0, num)

    def _draw_shared(
        self, column: Column, index: RelationIndex, work: Workspace, then: Drawn
    ) -> None:
        """Draw from a relation in memory, in pieces: idle workers draw some of them."""
        num, idle = column.nodes.size, self.helpers.idle
        size = max(_PIECE, -(-num // _PIECES)) if idle else num
        pieces = [(low, min(low + size, num)) for low in range(0, num, size)]

        def locate(i: int) -> None:
            low, high = pieces[i]
            part = column._replace(nodes=column.nodes[low:high])
            self.locate(part, work.blocks[low:high])

        def count(i: int) -> None:
            locate(i)
            column_degrees(index.view, column, work.blocks, IDENTITY, *pieces[i])

        def draw(i: int) -> None:
            if strided:
                locate(i)
            self._draw_groups(column, index, work, pieces[i], [(IDENTITY, *pieces[i])])

        strided = self._has_stride(column, work)
        if not strided:
            self.helpers.share(len(pieces), count, nothing)
        self._place(column, work)
        self.helpers.share(len(pieces), draw, lambda i: then(*pieces[i]))

    def _draw_groups(
        self,
        column: Column,
        index: RelationIndex,
        work: Workspace,
        piece: tuple[int, int],
        groups: Iterable[tuple[NDArray[np.uint32], int, int]],
    ) -> None:
        """Draw for a range of the frontier, its entries in groups whose head blocks are held."""
        own, n = slice(*piece), 0
        multi_block = MultiBlockColumns(work.multi_block[own], work.multi_block_degrees[own])
        draws = self.draws(
            column, work.starts, work.draws, work.starts, work.record_draws, work.record
        )
        for order, low, high in groups:
            n = draw_columns(
                index.view, column, work.blocks, order, low, high, draws, multi_block, n
            )
        multi_block = MultiBlockColumns(multi_block.entries[:n], multi_block.degrees[:n])
        self.draw_multi_block(
            [MultiBlockDraws(column, work.blocks, draws, multi_block)],
            lambda marks: self._held_whole(column.relation, marks),
        )

    def count_edges(self, column: Column, work: Workspace) -> None:
        """Write the degrees of a frontier into its counts."""
        index = self.relations[column.relation]
        column.counts[:] = 0
        if column.nodes.size and index.num_blocks:
            self.locate(column, work.blocks)
            self._count(column, index, work)

    def _count(self, column: Column, index: RelationIndex, work: Workspace) -> None:
        for order, low, high in self._groups(column, index, work):
            column_degrees(index.view, column, work.blocks, order, low, high)

    def keep(self, column: Column, work: Workspace, chosen: ChosenNodes) -> None:
        """Keep the edges of a frontier from chosen nodes: `work.draws` at `work.starts`.

        Raises WorkspaceFull: there are more than `work.draws` has room for.
        """
        num, index = column.nodes.size, self.relations[column.relation]
        column.counts[:] = 0
        if num == 0 or index.num_blocks == 0:
            return
        self.locate(column, work.blocks)
        draws = self.draws(
            column, work.starts, work.draws, work.starts, work.record_draws, work.record
        )
        degrees, blocks, view = work.multi_block_degrees, work.blocks, index.view
        degrees[:num] = used = 0
        for order, low, high in self._groups(column, index, work):
            used = keep_columns(
                view, column, blocks, order, low, high, chosen, draws, degrees, used
            )
            if used < 0:
                raise WorkspaceFull
        # columns over several blocks: all their parts, in the order of the blocks
        long = np.flatnonzero(degrees[:num])
        long = long[np.argsort(blocks[long], kind="stable")]
        counts = -(-degrees[long] // view.capacity)
        part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        parts = np.stack([np.repeat(long, counts), part], axis=1)
        share = self.residency.pool.worker_blocks
        for i in range(0, len(parts), share):
            own = parts[i : i + share]
            needed = np.unique(blocks[own[:, 0]] + own[:, 1])
            held = self.residency.hold(column.relation, needed, account=Account.WORKER)
            try:
                used = keep_parts(view, column, blocks, own, degrees, chosen, draws, used)
            finally:
                self.residency.drop(held)
            if used < 0:
                raise WorkspaceFull

    def _has_stride(self, column: Column, work: Workspace) -> bool:
        """Whether all columns can have `fanout` draws; else their degrees are needed first."""
        return 0 <= column.nodes.size * column.rule.fanout <= work.draws.size

    def _place(self, column: Column, work: Workspace) -> None:
        """Assign room in `draws` to each column; without a stride, by the degrees in its counts."""
        num, rule = column.nodes.size, column.rule
        if self._has_stride(column, work):
            stride_starts(num, rule.fanout, work.starts)
            return
        if rule.replace:
            raise WorkspaceFull
        if rule.fanout >= 0:
            np.minimum(column.counts, rule.fanout, out=column.counts)
        total = prefix_starts(column.counts, num, work.starts)
        if total > work.draws.size:
            raise WorkspaceFull

    def _groups(
        self, column: Column, index: RelationIndex, work: Workspace
    ) -> Iterator[tuple[NDArray[np.uint32], int, int]]:
        """(order, low, high): entries whose head block is held while the caller works on them."""
        num = column.nodes.size
        if self.residency.hold_file(column.relation):
            try:
                yield IDENTITY, 0, num
            finally:
                self.residency.drop_file(column.relation)
            return
        starts = work.block_starts[: index.num_blocks + 1]
        placed = order_by_block(work.blocks, num, starts, work.order)
        if placed < num:  # nodes of other types have no edges here
            column.counts[work.blocks[:num] < 0] = 0
        needed = np.flatnonzero(np.diff(starts)).astype(np.int64)
        for blocks in self._held(column.relation, needed):
            runs = np.searchsorted(needed, blocks)
            breaks = np.flatnonzero(np.diff(runs) != 1) + 1
            for run in np.split(blocks, breaks):
                yield work.order, int(starts[run[0]]), int(starts[run[-1] + 1])

    def _held(self, relation: int, needed: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """`needed` in groups of a worker's share, those in memory first, each held in turn."""
        here, share = self.residency.present(relation, needed), self.residency.pool.worker_blocks
        for part in (needed[here], needed[~here]):
            for i in range(0, part.size, share):
                group = part[i : i + share]
                held = self.residency.hold(relation, group, account=Account.WORKER)
                try:
                    yield group
                finally:
                    self.residency.drop(held)
