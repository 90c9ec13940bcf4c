"""Drives the sampling kernels as the engine does: all blocks present, or a few at a time."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES
from blockstore.kernels.locate import build_guide, choose_shift, locate_columns
from blockstore.kernels.order import order_by_block, prefix_starts, stride_starts
from blockstore.kernels.sample import (
    column_degrees,
    column_edge_ids,
    column_items,
    fill_giant_edge_ids,
    fill_giants,
    giant_blocks,
    sample_columns,
)
from tests import reference
from tests.graphs import FILL, Held

IDENTITY = np.empty(0, np.uint32)
GUARD = 3  # items after the last draw, which must stay as they are


class Draws(NamedTuple):
    """What came out: per frontier entry its sources and the ids of their edges."""

    sources: list[list[int]]
    edge_ids: list[list[int]] | None


class Sampler:
    """One frontier over one relation."""

    def __init__(self, held: Held, columns: Any, fanout: int, key: int, replace: bool = False):
        """`columns` beyond the graph's stand for nodes of another type."""
        self.held, self.fanout, self.key, self.replace = held, fanout, np.uint64(key), replace
        self.nodes = held.nodes(columns)
        self.num = self.nodes.size
        self.blocks = np.empty(self.num, np.int32)
        shift = choose_shift(held.graph.num_nodes, len(held.blocks))
        guide = build_guide(held.first_node, held.first, held.graph.num_nodes, shift)
        locate_columns(
            self.nodes, self.num, held.first, held.graph.num_nodes, held.first_node, guide, shift,
            self.blocks,
        )  # fmt: skip
        self.starts = np.empty(self.num + 1, np.int64)
        self.counts = np.full(self.num, 99, np.uint32)
        self.giants = np.empty(self.num, np.uint32)
        self.giant_degrees = np.empty(self.num, np.int64)
        self.id_bytes = ITEM_BYTES[held.id_dtype]

    def place(self, groups: Any) -> None:
        """Room for each column's draws."""
        if self.fanout >= 0:
            stride_starts(self.num, self.fanout, self.starts)
        else:
            self.counts[self.blocks < 0] = 0
            for arena, slots, order, low, high in groups:
                column_degrees(
                    arena.view(np.uint32), self.nodes, order, low, high, self.blocks,
                    self.held.first_node, slots, self.held.slot_bytes, self.id_bytes,
                    self.held.capacity, self.counts,
                )  # fmt: skip
            prefix_starts(self.counts, self.num, self.starts)
        room = int(self.starts[self.num]) + GUARD
        self.draws = np.full(room, 77, self.held.id_dtype)
        self.edge_draws = np.full(room, 77, self.held.edge_id_dtype or "uint32")

    def sample(self, groups: Any) -> int:
        """Columns that lie in one block; returns the number of the others."""
        held, num_giants = self.held, 0
        for arena, slots, order, low, high in groups:
            words = arena.view(np.uint32)
            shared = (
                self.nodes, order, low, high, self.blocks, held.first_node, slots, held.slot_bytes,
                self.id_bytes, held.capacity, self.fanout, self.replace, self.key, self.starts,
            )  # fmt: skip
            num_giants = sample_columns(
                words, arena.view(held.id_dtype), *shared, self.draws, self.counts, self.giants,
                self.giant_degrees, num_giants,
            )  # fmt: skip
            if held.edge_id_dtype:
                column_edge_ids(words, arena.view(held.edge_id_dtype), *shared, self.edge_draws)
        return int(num_giants)

    def giant_blocks(self, num_giants: int) -> NDArray[np.int64]:
        """Blocks that picks of giants lie in."""
        marks = np.zeros(len(self.held.blocks), np.uint8)
        giant_blocks(
            self.giants, self.giant_degrees, num_giants, self.nodes, self.blocks,
            self.held.capacity, self.fanout, self.replace, self.key, marks,
        )  # fmt: skip
        return np.flatnonzero(marks)

    def fill(self, num_giants: int, arena: NDArray[np.uint8], slots: NDArray[np.int32]) -> None:
        """Picks of giants whose block is present."""
        held, words = self.held, arena.view(np.uint32)
        shared = (
            self.giants, self.giant_degrees, num_giants, self.nodes, self.blocks, slots,
            held.slot_bytes, self.id_bytes, held.capacity, self.fanout, self.replace, self.key,
            self.starts,
        )  # fmt: skip
        fill_giants(words, arena.view(held.id_dtype), *shared, self.draws)
        if held.edge_id_dtype:
            fill_giant_edge_ids(words, arena.view(held.edge_id_dtype), *shared, self.edge_draws)

    def result(self) -> Draws:
        """Draws by entry; whatever lies outside them must be as it was."""
        places = [
            np.arange(s, s + c) for s, c in zip(self.starts[:-1], self.counts, strict=True)
        ]  # fmt: skip
        used = np.zeros(self.draws.size, bool)
        used[np.concatenate([*places, np.empty(0, np.int64)]).astype(np.int64)] = True
        assert (self.draws[~used] == 77).all()
        sources = [self.draws[place].tolist() for place in places]
        if self.held.edge_id_dtype is None:
            return Draws(sources, None)
        assert (self.edge_draws[~used] == 77).all()
        return Draws(sources, [self.edge_draws[place].tolist() for place in places])


def sample_present(held: Held, columns: Any, fanout: int, key: int, replace: bool = False) -> Draws:
    """One call with all blocks present, entries in their own order."""
    sampler = Sampler(held, columns, fanout, key, replace)
    everything = [(held.arena, held.slot_of_block, IDENTITY, 0, sampler.num)]
    sampler.place(everything)
    num_giants = sampler.sample(everything)
    sampler.giant_blocks(num_giants)
    sampler.fill(num_giants, held.arena, held.slot_of_block)
    return sampler.result()


def sample_items(
    held: Held, columns: Any, fanout: int, key: int, replace: bool, first: int
) -> list[list[int]]:
    """The picks as numbers of edges in block order, from `first` on."""
    sampler = Sampler(held, columns, fanout, key, replace)
    everything = [(held.arena, held.slot_of_block, IDENTITY, 0, sampler.num)]
    sampler.place(everything)
    sampler.sample(everything)
    counts = [int(block[28:32].view(np.uint32)[0]) for block in held.blocks]
    draws = np.full(sampler.draws.size, 77, np.uint64)
    column_items(
        held.arena.view(np.uint32), sampler.nodes, IDENTITY, 0, sampler.num, sampler.blocks,
        held.first_node, np.cumsum([first, *counts]).astype(np.int64), held.slot_of_block,
        held.slot_bytes, held.capacity, fanout, replace, sampler.key, sampler.starts, draws,
    )  # fmt: skip
    ends = zip(sampler.starts[:-1], sampler.counts, strict=True)
    return [draws[start : start + count].tolist() for start, count in ends]


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
) -> Draws:
    """In block order, `together` head blocks present at a time; then giants, block by block."""
    sampler = Sampler(held, columns, fanout, key, replace)
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
    num_giants = sampler.sample(groups())
    marked = sampler.giant_blocks(num_giants)
    for at in range(0, marked.size, together):
        sampler.fill(num_giants, *_present(held, marked[at : at + together], at))
    return sampler.result()


def expected(held: Held, columns: Any, fanout: int, key: int, replace: bool = False) -> Draws:
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
        return Draws(sources, None)
    return Draws(sources, [[int(graph.edge_ids[e]) for e in column] for column in edges])
