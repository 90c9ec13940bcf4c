"""Drives the sampling kernels as the engine does: all blocks present, or a few at a time."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.locate import build_guide, choose_shift, locate_columns
from blockstore.kernels.order import order_by_block, prefix_starts, stride_starts
from blockstore.kernels.picks import BY_SOURCE, UNIFORM, Column, Draws, Rule
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.sample import (
    MultiBlockColumns,
    column_degrees,
    draw_columns,
    fetch_multi_block,
    make_picks,
    mark_multi_block,
    pick_multi_block,
    rank_multi_block,
    rank_seams,
)
from loaderd.sampling.records import section
from tests import reference
from tests.graphs import FILL, Held

IDENTITY = np.empty(0, np.uint32)
GUARD = 3  # items after the last draw, which must stay as they are


NO_TREES = np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.uint64)
NO_ITEMS = np.empty(0, np.int64)


class Found(NamedTuple):
    """What came out: per frontier entry its sources and the ids of their edges."""

    sources: list[list[int]]
    edge_ids: list[list[int]] | None


class Sampler:
    """One frontier over one relation."""

    def __init__(
        self, held: Held, columns: Any, rule: Rule, first_item: NDArray[np.int64] = NO_ITEMS
    ) -> None:
        """`columns` beyond the graph's stand for nodes of another type."""
        self.held, self.rule, self.first_item = held, rule, first_item
        nodes = held.nodes(columns)
        self.num = nodes.size
        self.blocks = np.empty(self.num, np.int32)
        shift = choose_shift(held.graph.num_nodes, len(held.blocks))
        guide = build_guide(held.first_node, held.first, held.graph.num_nodes, shift)
        locate_columns(
            nodes, self.num, held.first, held.graph.num_nodes, held.first_node, guide, shift,
            self.blocks,
        )  # fmt: skip
        self.starts = np.empty(self.num + 1, np.int64)
        self.counts = np.full(self.num, 99, np.uint32)
        self.column = Column(nodes, 0, self.counts, rule)
        self.multi_block = MultiBlockColumns(
            np.empty(self.num, np.uint32), np.empty(self.num, np.int64)
        )

    def place(self, groups: Any) -> None:
        """Room for each column's draws."""
        if self.rule.fanout >= 0:
            stride_starts(self.num, self.rule.fanout, self.starts)
        else:
            self.counts[self.blocks < 0] = 0
            for arena, slots, order, low, high in groups:
                view = self.held.view(arena, slots)
                column_degrees(view, self.column, self.blocks, order, low, high)
            prefix_starts(self.counts, self.num, self.starts)
        room = int(self.starts[self.num]) + GUARD
        ids, items = self.held.edge_id_dtype, 2 * bool(self.first_item.size)
        self.record = EdgeRecord()
        if ids or items:  # sections that the blocks do not hold come as zeros
            self.record = EdgeRecord(np.dtype(ids or "uint32").itemsize // 4, 1, 2, items)
        words = self.record.size
        self.draws = Draws(
            self.starts, np.full(room, 77, self.held.id_dtype), self.starts,
            np.full((room * bool(words), max(1, words)), 77, np.uint32), self.record,
            self.first_item,
        )  # fmt: skip

    def sample(self, groups: Any) -> None:
        """Columns that lie in one block; the others are known then."""
        n = 0
        for arena, slots, order, low, high in groups:
            view = self.held.view(arena, slots)
            n = int(
                draw_columns(
                    view,
                    self.column,
                    self.blocks,
                    order,
                    low,
                    high,
                    self.draws,
                    self.multi_block,
                    n,
                )
            )
        self.multi_block = MultiBlockColumns(
            self.multi_block.entries[:n], self.multi_block.degrees[:n]
        )
        self.picks = make_picks(self.rule, self.multi_block, self.held.capacity)

    def mark(self) -> NDArray[np.int64]:
        """Blocks that picks of multi-block columns lie in."""
        marks = np.zeros(len(self.held.blocks), np.uint8)
        mark_multi_block(self.held.capacity, self.blocks, self.multi_block, self.picks, marks)
        return np.flatnonzero(marks)

    def multi_blocks(self, together: int = 1) -> NDArray[np.int64]:
        """The same; a ranked draw looks at all blocks of those columns, the last first."""
        if self.rule.kind == UNIFORM:
            pick_multi_block(self.column, self.multi_block, self.picks)
            return self.mark()
        whole = self.mark()[::-1]
        self.picks.found[:] = 0
        for at in range(0, whole.size, together):
            view = self.held.view(*_present(self.held, whole[at : at + together], at))
            rank_multi_block(view, self.column, self.blocks, self.multi_block, self.picks)
        if self.rule.kind == BY_SOURCE:
            rank_seams(self.held.capacity, self.column, self.multi_block, self.picks)
        for positions, count in zip(self.picks.positions, self.picks.found, strict=True):
            positions[:count].sort()
        picked = self.mark()
        assert set(picked) <= set(whole)
        return picked

    def fill(self, arena: NDArray[np.uint8], slots: NDArray[np.int32]) -> None:
        """Picks of multi-block columns whose block is present."""
        view = self.held.view(arena, slots)
        fetch_multi_block(view, self.column, self.blocks, self.draws, self.multi_block, self.picks)

    def result(self) -> Found:
        """Draws by entry; whatever lies outside them must be as it was."""
        spans = list(zip(self.starts[:-1].tolist(), self.counts.tolist(), strict=True))
        used = np.zeros(self.draws.sources.size, bool)
        for start, count in spans:
            used[start : start + count] = True
        sources, records = self.draws.sources, self.draws.edges
        assert (sources[~used] == 77).all()
        assert (records[~used[: len(records)]] == 77).all()

        def by_entry(values: NDArray[Any]) -> list[list[int]]:
            return [values[start : start + count].tolist() for start, count in spans]

        if not records.size:
            return Found(by_entry(sources), None)
        self._check_beside(records[used])
        edges = section(records, self.record, "items" if self.first_item.size else "ids")
        return Found(by_entry(sources), by_entry(edges))

    def _check_beside(self, records: NDArray[np.uint32]) -> None:
        """Weights and times are those of the edges, by their ids."""
        held, graph = self.held, self.held.graph
        ids = section(records, self.record, "ids")
        if not held.edge_id_dtype:
            assert not ids.any()
            return
        order = np.argsort(graph.edge_ids)
        places = order[np.searchsorted(graph.edge_ids, ids, sorter=order)]
        for name, there, values in (
            ("weights", held.beside[0], graph.weights), ("times", held.beside[1], graph.times),
        ):  # fmt: skip
            wanted = values[places] if there else np.zeros(places.size)
            assert section(records, self.record, name).tolist() == wanted.tolist(), name


def uniform(fanout: int, key: int, replace: bool = False) -> Rule:
    return Rule(fanout, replace, UNIFORM, np.uint64(key), *NO_TREES)


def draw_present(held: Held, columns: Any, rule: Rule, items: Any = NO_ITEMS) -> Found:
    """One call with all blocks present, entries in their own order."""
    sampler = Sampler(held, columns, rule, items)
    everything = [(held.arena, held.slot_of_block, IDENTITY, 0, sampler.num)]
    sampler.place(everything)
    sampler.sample(everything)
    sampler.multi_blocks()
    sampler.fill(held.arena, held.slot_of_block)
    return sampler.result()


def sample_present(held: Held, columns: Any, fanout: int, key: int, replace: bool = False) -> Found:
    return draw_present(held, columns, uniform(fanout, key, replace))


def sample_items(
    held: Held, columns: Any, fanout: int, key: int, replace: bool, first: int
) -> list[list[int]]:
    """The picks as numbers of edges in block order, from `first` on."""
    counts = [int(block[28:32].view(np.uint32)[0]) for block in held.blocks]
    items = np.cumsum([first, *counts]).astype(np.int64)
    found = draw_present(held, columns, uniform(fanout, key, replace), items).edge_ids
    assert found is not None
    return found


def _present(held: Held, blocks: Any, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """A small arena in which only these blocks are, and where."""
    slots = np.full(len(held.blocks), -1, np.int32)
    slots[blocks] = np.random.default_rng(seed).permutation(len(blocks) + 1)[: len(blocks)]
    arena = np.full((len(blocks) + 1) * held.slot_bytes, FILL, np.uint8)
    for block in blocks:
        arena[slots[block] * held.slot_bytes :][: held.blocks[block].size] = held.blocks[block]
    return arena, slots


def sample_by_block(
    held: Held, columns: Any, fanout: int, key: int, replace: bool, together: int
) -> Found:
    """In block order, `together` head blocks at a time; then multi-block columns by block."""
    sampler = Sampler(held, columns, uniform(fanout, key, replace))
    starts = np.empty(len(held.blocks) + 1, np.int64)
    order = np.full(sampler.num, 99, np.uint32)
    order_by_block(sampler.blocks, sampler.num, starts, order)

    def groups() -> Any:
        for block in range(0, len(held.blocks), together):
            stop = min(block + together, len(held.blocks))
            arena, slots = _present(held, range(block, stop), block)
            yield arena, slots, order, int(starts[block]), int(starts[stop])

    sampler.place(groups())
    sampler.counts[sampler.blocks < 0] = 0  # no group has them
    sampler.sample(groups())
    marked = sampler.multi_blocks(together)
    for at in range(0, marked.size, together):
        sampler.fill(*_present(held, marked[at : at + together], at))
    return sampler.result()


def expected(held: Held, columns: Any, fanout: int, key: int, replace: bool = False) -> Found:
    """What the reference draws."""
    graph = held.graph
    edges = [
        reference.sample_edges(graph.indptr, c, fanout, key, replace, held.first)
        if c < graph.num_nodes
        else []
        for c in columns
    ]
    sources = [[int(graph.indices[e]) for e in column] for column in edges]
    if held.edge_id_dtype is None:
        return Found(sources, None)
    return Found(sources, [[int(graph.edge_ids[e]) for e in column] for column in edges])
