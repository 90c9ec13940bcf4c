"""Batches of a hyperbatch sampled together, hop by hop and block by block (AGNES, section 3).

The frontiers of all batches are brought into block order; each block that any of them needs is held
once, those in memory first, and while one group of blocks is sampled from the next is read.  A pass
over the blocks serves the last hop of one hyperbatch, the hop before it of the next one, and so on:
the first hops of batches take little room, and nearly every block is needed by any of them.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.kernels.order import (
    compact_records,
    entries_of_blocks,
    order_by_block,
)
from blockstore.kernels.picks import Column, Draws
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.sample import MultiBlockColumns, column_degrees, draw_columns
from loaderd.memory.blob import chained, joined
from loaderd.memory.residency import Account, PinnedBlocks
from loaderd.memory.workspace import Workspace, WorkspaceFull
from loaderd.monitoring.trace import BLOCKS, Trace
from loaderd.plans.base import Unit
from loaderd.plans.hyperbatch import block_schedule
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.plans.roots import Roots, drop_seed_edges
from loaderd.sampling.hyperbatch.areas import AreaFull, Sampled, StructureArea
from loaderd.sampling.hyperbatch.compact import keep_counts, keep_sources, kept_sources
from loaderd.sampling.hyperbatch.single import SessionWorkers
from loaderd.sampling.hyperbatch.unfinished import (
    BegunBatches,
    Frontier,
    SamplingMemory,
    UnfinishedBatch,
)
from loaderd.sampling.records import flat, record_dtype, section
from loaderd.sampling.renumbering import Renumbering
from loaderd.sampling.structure import NO_TREES, HeldBlocks, Structure, StructureArrays, make_column
from loaderd.sampling.topology import MultiBlockDraws, Topology

# Hyperbatches begun early are wasted if a client does not read step after step.  One miss does not
# count: an epoch may be left, or resumed in the middle.
_MISSES = 2


class BatchRules(NamedTuple):
    """What determines the batches of a session."""

    plan: MinibatchPlan
    begin: Callable[[Sequence[Unit], HeldBlocks], list[Roots]]  # the roots of batches
    record: EdgeRecord  # what comes with each sampled edge


def _halves(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    """The first half of them, then half of that, ..., at last the first one."""
    count = max(1, len(units) // 2)
    while units:
        yield units[:count]
        if count == 1:
            return
        count //= 2


class BlockSampler:
    """Samples batches together if the graph is not in memory: per hop, a block is read once."""

    def __init__(
        self,
        rules: BatchRules,
        topology: Topology,
        workers: SessionWorkers,
        memory: SamplingMemory,
        turn: concurrency.Lock,
        trace: Trace | None = None,
    ) -> None:
        """`turn`: a lock, as only one session of a store at a time samples by blocks."""
        self._plan, self._roots, self._record = rules
        self._topology, self._residency = topology, topology.residency
        self._workers, self._scratch, self._ids = workers, memory.scratch, topology.id_dtype
        # hyperbatches that are begun early, each a hop behind the one before it; areas for more
        self._begun, self._free = list(memory.begun), list(memory.areas)
        self._maximum = 0  # most batches of a hyperbatch so far
        self._ranks = list[int]()  # ranks whose batches are asked for
        self._expected: Unit | None = None  # the one after those asked for last
        self._missed = 0  # how often in a row another unit was asked for
        self._turn, self._upward, self._trace = turn, True, trace
        self._words = np.dtype((np.uint32, max(1, self._record.size)))  # of an edge's record

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """Sample as many of the first units as the areas hold.  Raises what sampling raises.

        The batches that are likely to be asked for next are begun meanwhile.
        """
        self._maximum = max(self._maximum, len(units))
        self._missed = 0 if self._expected in (None, *units[:1]) else self._missed + 1
        early = self._missed < _MISSES
        ranks = {unit.step % self._plan.together for unit in units}
        # a few units may not include every rank
        known = ranks if len(units) >= self._plan.together else ranks.union(self._ranks)
        self._ranks = sorted(known)
        for number, some in enumerate([units, *_halves(units)]):
            if not some or cancelled():
                break
            found: list[UnfinishedBatch] = []
            # Workspaces may be in use until the client takes batches, and it may wait for another
            # session: so wait for one before taking the turn that others wait for.
            try:
                with self._workers.holding(large=bool(number)):
                    found = self._sample(some, area, early and not number, cancelled)
            finally:
                if not found:
                    self._forget()
            if found:
                self._expected = self._after(found[-1].unit)
                return [self._finish(first + i, batch) for i, batch in enumerate(found)]
            area.rewind()  # so many batches filled it before any was done
        return []

    def _sample(
        self, units: Sequence[Unit], area: StructureArea, early: bool, cancelled: Callable[[], bool]
    ) -> list[UnfinishedBatch]:
        with self._turn, concurrency.ThreadPoolExecutor(1, "hyper-read") as ahead:
            batches = self._take_begun(units, area) or self._root(units, area, ahead)
            while batches and batches[0].hop < len(self._plan.resolved.fanouts):
                if cancelled():
                    return []
                before = self._begun[-1].batches if self._begun else batches
                if early and before[-1].hop > 0:
                    self._begin_next(before[-1].unit, ahead)
                self._pass(batches, ahead)
        return batches

    def _root(
        self, units: Sequence[Unit], area: StructureArea, ahead: concurrency.ThreadPoolExecutor
    ) -> list[UnfinishedBatch]:
        """As many batches as have room, before their first hop."""
        batches: list[UnfinishedBatch] = []
        found = self._roots(units, lambda r, marks: self._held(r, marks, ahead))
        with contextlib.suppress(AreaFull):
            for unit, roots in zip(units, found, strict=True):
                trees: list[NDArray[np.uint32]] = []
                if roots.forest is not None:
                    trees = [np.arange(roots.nodes.size, dtype=np.uint32)]
                batch = UnfinishedBatch(
                    unit, area, [roots.nodes], roots.places, roots.ends, roots.excluded,
                    roots.times, roots.forest, trees,
                )  # fmt: skip
                batch.move(area)
                batches.append(batch)
        return batches

    # -- hyperbatches that are begun early --------------------------------------------------------

    def _take_begun(self, units: Sequence[Unit], area: StructureArea) -> list[UnfinishedBatch]:
        """Move the first of these batches, if they were begun, to the area; else returns none."""
        if not self._begun:
            return []
        batches: list[UnfinishedBatch] = []
        with contextlib.suppress(AreaFull):
            for batch, unit in zip(self._begun[0].batches, units, strict=False):
                if batch.unit != unit:
                    break
                batch.move(area)
                batches.append(batch)
        if batches:
            self._give_back(self._begun.pop(0))
        else:
            self._forget()
        return batches

    def begin(self, after: Sequence[Unit], size: int) -> SamplingMemory:
        """Begin the hyperbatches of `size` that are likely to follow some units.

        Returns the memory with them, for the sampler that goes on in place of this one.
        """
        self._maximum = size
        self._ranks = sorted({unit.step % self._plan.together for unit in after})
        unit = after[-1]
        with (
            self._workers.holding(),
            self._turn,
            concurrency.ThreadPoolExecutor(1, "hyper-read") as ahead,
        ):
            for _ in range(len(self._free)):
                self._begin_next(unit, ahead)
                self._pass([], ahead)
                if not self._begun:
                    break
                unit = self._begun[-1].batches[-1].unit
        return SamplingMemory(self._scratch, tuple(self._free), self._begun)

    def _begin_next(self, unit: Unit, ahead: concurrency.ThreadPoolExecutor) -> None:
        """Begin the hyperbatch that is likely to follow a unit, if there is an area for it."""
        if not self._free:
            return
        units = [self._after(unit)]
        # the next epoch is asked for when this one has been read: they share no hyperbatch
        while (
            len(units) < self._maximum and (unit := self._after(units[-1])).epoch == units[0].epoch
        ):
            units.append(unit)
        begun = BegunBatches([], self._free.pop())
        self._begun.append(begun)
        begun.batches.extend(self._root(units, begun.area, ahead))
        self._forget_empty()

    def _after(self, unit: Unit) -> Unit:
        """The next unit of the ranks whose batches are asked for, maybe in the next epoch."""
        first, together = unit.step + 1, self._plan.together
        steps = [first + (rank - first) % together for rank in self._ranks]
        if min(steps) < self._plan.num_steps:
            return self._plan.unit(unit.epoch, min(steps))
        return self._plan.unit(unit.epoch + 1, self._ranks[0])

    def _forget(self) -> None:
        while self._begun:
            self._give_back(self._begun.pop())

    def _forget_empty(self) -> None:
        """Give up the last hyperbatches as long as they have no batches left."""
        while self._begun and not self._begun[-1].batches:
            self._give_back(self._begun.pop())

    def _give_back(self, begun: BegunBatches) -> None:
        begun.area.reset()
        self._free.append(begun.area)

    def _finish(self, number: int, batch: UnfinishedBatch) -> Sampled:
        structure = Structure(
            tuple(piece.size for piece in batch.pieces),
            tuple(batch.edges_per_hop),
            batch.num_nodes,
            sum(sum(edges) for edges in batch.edges_per_hop),
            tuple(batch.expanded),
            batch.index.size,
            batch.ends.size,
        )
        local = [
            kept_sources(kept, sum(edges))
            for kept, edges in zip(batch.local, batch.edges_per_hop, strict=True)
        ]
        arrays = StructureArrays(
            tuple(batch.pieces), joined(batch.counts, np.uint32), chained(local, np.uint32),
            joined(batch.records, record_dtype(self._record)), joined([batch.index]),
            joined([batch.ends]), joined(batch.trees, np.uint32), joined([batch.times]),
        )  # fmt: skip
        return Sampled(
            number, batch.unit, structure, arrays, batch.area, edges=tuple(batch.items),
            num_bytes=batch.num_bytes,
        )  # fmt: skip

    # -- one pass ---------------------------------------------------------------------------------

    def _pass(self, batches: list[UnfinishedBatch], ahead: concurrency.ThreadPoolExecutor) -> None:
        """Sample the next hop, of begun batches too; the last are left out if room is lacking."""
        groups = [batches, *(begun.batches for begun in self._begun)]
        every = [batch for group in groups for batch in group]
        self._hop(every, ahead)
        left = len(every)
        for group in groups:
            del group[left:]
            left -= len(group)
        self._forget_empty()

    def _hop(self, batches: list[UnfinishedBatch], ahead: concurrency.ThreadPoolExecutor) -> None:
        while batches:
            self._scratch.reset()
            self._each(batches, lambda batch, _: self._begin(batch))
            part = self._draw_all(batches, ahead)
            if part == 1:
                break
            # no batch has all of its draws: as many as have room are drawn again
            del batches[min(max(1, int(part * len(batches))), len(batches) - 1) :]
        self._each(batches, self._renumber)

    def _draw_all(
        self, batches: Sequence[UnfinishedBatch], ahead: concurrency.ThreadPoolExecutor
    ) -> float:
        """Draw for all frontiers; returns for which part of them there was room."""
        done, total = 0, sum(f.order.size for batch in batches for f in batch.frontiers)
        for r, index in enumerate(self._topology.relations):
            needed = np.zeros(index.num_blocks, np.uint8)
            for batch in batches:
                needed |= np.diff(batch.frontiers[r].block_starts) > 0
            with contextlib.closing(self._held(r, needed, ahead)) as groups:
                for blocks in groups:
                    left = list(batches)
                    self._each(left, partial(self._draw, r, blocks))
                    if len(left) < len(batches):
                        return done / total
                    done += sum(b.frontiers[r].count(blocks) for b in batches)
            self._draw_multi_block(r, batches, ahead)
            self._upward = not self._upward
        return 1.0

    def _each(
        self, batches: list[UnfinishedBatch], step: Callable[[UnfinishedBatch, Workspace], None]
    ) -> None:
        """Do a step for every batch; the first that finds no room and all after it are left out."""
        full: list[int] = []

        def run(i: int, work: Workspace) -> bool:
            try:
                step(batches[i], work)
            except AreaFull:
                full.append(i)
                return False
            return True

        self._workers.run(len(batches), run)
        if full:
            del batches[min(full) :]

    def _begin(self, batch: UnfinishedBatch) -> None:
        """Bring a batch's frontier into block order, for every relation."""
        nodes, scratch, hop = batch.pieces[-1], self._scratch, batch.hop
        trees = batch.trees[-1] if batch.trees else NO_TREES
        if self._plan.resolved.frontier == "layer" and hop > 0:
            nodes = scratch.take(self._ids, batch.num_nodes)
            np.concatenate(batch.pieces, out=nodes)
            if batch.trees:
                trees = scratch.take(np.uint32, batch.num_nodes)
                np.concatenate(batch.trees, out=trees)
        batch.frontiers = []
        batch.expanded[hop:] = [nodes.size]  # an attempt before may have found no room
        for r, index in enumerate(self._topology.relations):
            counts = scratch.take(np.uint32, nodes.size)
            counts[:] = 0
            column = make_column(self._plan, batch.unit, hop, r, nodes, counts, trees, batch.forest)
            blocks = scratch.take(np.int32, nodes.size)
            order = scratch.take(np.uint32, nodes.size)
            block_starts = scratch.take(np.int32, index.num_blocks + 1)
            starts = scratch.take(np.int64, nodes.size + 1)
            starts[:] = 0
            if column.rule.fanout == 0:
                blocks[:] = -1
            else:
                self._topology.locate(column, blocks)
            order_by_block(blocks, nodes.size, block_starts, order)
            draws = self._whole_scratch(column, starts)
            if draws.edges.size:
                edge_starts = scratch.take(np.int64, nodes.size + 1)
                edge_starts[:] = 0
                draws = draws._replace(edge_starts=edge_starts)
            batch.frontiers.append(Frontier(column, blocks, order, block_starts, draws))

    def _whole_scratch(self, column: Column, starts: NDArray[np.int64]) -> Draws:
        """Draws to any free place of the scratch: starts count from its first item."""
        words, size = self._scratch.view(np.uint32), self._record.size
        records = words[: words.size // max(1, size) * size].reshape(-1, max(1, size))
        sources = self._scratch.view(self._ids)
        return self._topology.draws(column, starts, sources, starts, records, self._record)

    def _draw(
        self, r: int, blocks: NDArray[np.int64], batch: UnfinishedBatch, work: Workspace
    ) -> None:
        """Draw for the entries of a relation whose blocks are held."""
        frontier = batch.frontiers[r]
        column, draws = frontier.column, frontier.draws
        size = column.nodes.size
        entries = work.order if work.order.size >= size else np.empty(size, np.uint32)
        num = int(entries_of_blocks(frontier.order, frontier.block_starts, blocks, entries))
        if num == 0:
            return
        index, rule = self._topology.relations[column.relation], column.rule
        column_degrees(index.view, column, frontier.blocks, entries, 0, num)
        chosen = entries[:num]
        drawn = column.counts[chosen].astype(np.int64)  # edges of each
        if rule.fanout >= 0:
            np.minimum(drawn, 1 if rule.replace else rule.fanout, out=drawn)
            drawn *= rule.fanout if rule.replace else 1
        ends = np.cumsum(drawn)
        total, places = int(ends[-1]), ends - drawn
        draws.starts[chosen] = places + self._scratch.reserve(self._ids, total)
        if draws.edges.size:
            draws.edge_starts[chosen] = places + self._scratch.reserve(self._words, total)
        multi_block = MultiBlockColumns(np.empty(0, np.uint32), np.empty(0, np.int64))
        if index.has_multi_block:
            multi_block = MultiBlockColumns(np.empty(num, np.uint32), np.empty(num, np.int64))
        n = draw_columns(
            index.view, column, frontier.blocks, entries, 0, num, draws, multi_block, 0
        )
        if n:
            own = MultiBlockColumns(multi_block.entries[:n].copy(), multi_block.degrees[:n].copy())
            frontier.multi_block.append(own)

    def _draw_multi_block(
        self, r: int, batches: Sequence[UnfinishedBatch], ahead: concurrency.ThreadPoolExecutor
    ) -> None:
        frontiers = [batch.frontiers[r] for batch in batches]
        self._topology.draw_multi_block(
            [
                MultiBlockDraws(f.column, f.blocks, f.draws, multi_block)
                for f in frontiers
                for multi_block in f.multi_block
            ],
            lambda marks: self._held(r, marks, ahead),
        )

    def _renumber(self, batch: UnfinishedBatch, work: Workspace) -> None:
        """Give local ids to what a hop found, and keep the nodes that are new."""
        self._exclude(batch)
        area = batch.area
        with self._workers.large_enough(work, lambda w: self._number(batch, w)) as (ends, w):
            before = batch.num_nodes
            batch.pieces.append(area.copy(w.n_id[before : ends[0]]))
            if batch.trees:
                batch.trees.append(area.copy(w.trees[before : ends[0]]))
            batch.local.append(keep_sources(w.local[: ends[-1]], before, ends[0], area))
            batch.counts += [keep_counts(f.column.counts, area) for f in batch.frontiers]
            if self._record.size:
                batch.records.append(area.copy(flat(w.records[: ends[-1]], self._record)))
            if self._record.items:
                items = section(w.records[: ends[-1]], self._record, "items")
                batch.items.append(area.copy(items))
            batch.edges_per_hop.append(tuple(b - a for a, b in pairwise([0, *ends[1:]])))

    def _exclude(self, batch: UnfinishedBatch) -> None:
        """Take out what the batch must not contain, if its hop expands seeds."""
        if not batch.excluded or (batch.hop and self._plan.resolved.frontier != "layer"):
            return
        for r, frontier in enumerate(batch.frontiers):
            draws = frontier.draws
            drop_seed_edges(
                batch.excluded, r, draws.starts, draws.sources, draws.edge_starts, draws.edges,
                frontier.column.counts,
            )  # fmt: skip

    def _number(self, batch: UnfinishedBatch, work: Workspace) -> list[int]:
        """Number in a workspace; returns the nodes then known, then each relation's last edge."""
        before, edge, ends, at = batch.num_nodes, 0, [0], 0
        wanted = sum(int(f.column.counts.sum()) for f in batch.frontiers)
        if before > work.n_id.size or wanted > work.local.size:
            raise WorkspaceFull
        for piece in batch.pieces:
            work.n_id[at : at + piece.size] = piece
            at += piece.size
        if batch.trees:
            np.concatenate(batch.trees, out=work.trees[:before])
        with Renumbering(work, before) as numbers:
            for frontier in batch.frontiers:
                draws, counts = frontier.draws, frontier.column.counts
                if draws.edges.size:
                    compact_records(
                        draws.edges, draws.edge_starts, counts, counts.size, work.records, edge
                    )
                trees = frontier.column.rule.trees
                edge = numbers.add(draws.sources, draws.starts, counts, edge, trees)
                ends.append(edge)
            ends[0] = numbers.num_nodes
        return ends

    # -- blocks -----------------------------------------------------------------------------------

    def _held(
        self, relation: int, needed: NDArray[np.uint8], ahead: concurrency.ThreadPoolExecutor
    ) -> Generator[NDArray[np.int64]]:
        """The needed blocks in groups, each held in turn while the next one is read."""
        everything = np.arange(needed.size)
        present = self._residency.present(relation, everything)
        # half of what may be held is sampled from while the other half is read
        share = max(1, self._residency.shared_room() // 2)
        groups = block_schedule(needed, present, self._upward, share)
        if self._trace is not None:
            self._trace.write(BLOCKS, 0, relation, np.flatnonzero(needed))
        hold = partial(self._residency.hold, relation, account=Account.SHARED)
        coming: concurrency.Future[PinnedBlocks] | None = None
        try:
            while groups or coming is not None:
                if coming is None:
                    wanted = groups.pop(0)
                    coming = ahead.submit(hold, wanted)
                held, blocks = coming.result(), wanted
                coming = None
                try:
                    if held.left_out.size:  # others hold too many: retry later
                        blocks = np.setdiff1d(blocks, held.left_out)
                        groups.append(held.left_out)
                    if groups and blocks.size:
                        wanted = groups.pop(0)
                        coming = ahead.submit(hold, wanted)
                    if blocks.size:
                        yield blocks
                finally:
                    self._residency.drop(held)
        finally:
            if coming is not None:
                self._residency.drop(coming.result())
