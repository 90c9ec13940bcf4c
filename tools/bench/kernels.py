"""Rates of the kernels on one thread and on several, beside memcpy in the same round."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, edge_layout
from blockstore.io.buffers import aligned_buffer
from blockstore.kernels.columns import view_blocks
from blockstore.kernels.crc import find_bad_page, page_crcs
from blockstore.kernels.locate import build_guide, choose_shift, locate_columns
from blockstore.kernels.order import stride_starts
from blockstore.kernels.picks import UNIFORM, Column, Draws, Rule
from blockstore.kernels.random import make_key
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.renumber import NodeTable, clear_table, renumber
from blockstore.kernels.rows import gather_rows
from blockstore.kernels.sample import MultiBlockColumns, draw_columns
from blockstore.store import open_store, scan_blocks
from tools.bench.harness import BenchPlan, GraphOptions, Run, Side

COPY_BYTES = 64 << 20  # a thread; beyond any cache
REPEATS = 3  # of a kernel in a round, of which the best counts

Job = Callable[[], object]


@dataclass(frozen=True)
class KernelOptions(GraphOptions):
    frontier: int = 100_000
    fanout: int = 10
    threads: tuple[int, ...] = (1, 4)
    rounds: int = 5


class HeldGraph:
    """The graph blocks of a store, all in memory, block b in slot b."""

    def __init__(self, path: Path) -> None:
        store = open_store(path)
        manifest, relation = store.manifest, store.manifest.relations[0]
        self.num_nodes, self.block_bytes = manifest.num_nodes, manifest.block_bytes
        data = aligned_buffer(relation.num_blocks * self.block_bytes)
        for first, blocks in scan_blocks(store.graph(relation)):
            data[first * self.block_bytes :][: blocks.size] = blocks.reshape(-1)
        first_node, layout = store.first_node(relation), edge_layout(manifest, relation)
        self.id_dtype = np.dtype(manifest.id_dtype)
        self.shift = choose_shift(self.num_nodes, relation.num_blocks)
        self.guide = build_guide(first_node, 0, self.num_nodes, self.shift)
        self.view = view_blocks(
            data, layout, np.arange(relation.num_blocks, dtype=np.int32), first_node,
            self.block_bytes, layout.capacity(self.block_bytes),
        )  # fmt: skip


class Frontier:
    """One hop of one worker: its nodes and workspace."""

    def __init__(self, graph: HeldGraph, size: int, fanout: int, number: int) -> None:
        self.graph, self.size, self.fanout = graph, size, fanout
        generator = np.random.default_rng(number)
        dtype = graph.id_dtype
        self.nodes = generator.permutation(graph.num_nodes)[:size].astype(dtype)
        self.blocks, self.starts = np.empty(size, np.int32), np.empty(size, np.int64)
        stride_starts(size, fanout, self.starts)
        self.draws, self.counts = np.zeros(size * fanout, dtype), np.empty(size, np.uint32)
        self.multi_block = MultiBlockColumns(np.empty(size, np.uint32), np.empty(size, np.int64))
        self.table = NodeTable(None, np.full(graph.num_nodes, -1, np.int32))
        self.n_id = np.empty(size * fanout, dtype)
        self.local = np.empty(size * fanout, np.uint32)
        key, none = np.uint64(make_key(number, 0, 0, 0, 0)), np.empty(0, np.int64)
        rule = Rule(fanout, False, UNIFORM, key, none.view("u4"), none, none.view("u8"))
        self.column = Column(self.nodes, 0, self.counts, rule)
        self.out = Draws(
            self.starts, self.draws, self.starts, none.view("u4")[:, None], EdgeRecord(), none
        )
        self.sample()
        self.num_edges = int(self.counts.sum())

    def sample(self) -> None:
        """Find the columns, draw the neighbors."""
        g = self.graph
        locate_columns(
            self.nodes, self.size, 0, g.num_nodes, g.view.first_node, g.guide, g.shift, self.blocks
        )
        order = np.empty(0, np.uint32)
        draw_columns(
            g.view, self.column, self.blocks, order, 0, self.size, self.out, self.multi_block, 0
        )

    def renumber(self) -> None:
        """Local ids of what was drawn, and the table cleared."""
        num_nodes, _ = renumber(
            self.draws, self.starts, self.counts, self.table, self.n_id, 0, self.local, 0,
            None, None,
        )  # fmt: skip
        clear_table(self.n_id, num_nodes, self.table, None)


def copy_job() -> Job:
    return partial(np.copyto, np.zeros(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8))


def crc_job() -> Job:
    data, num_pages = np.ones(COPY_BYTES, np.uint8), COPY_BYTES // PAGE_BYTES
    page_crcs(data, num_pages, expected := np.empty(num_pages, np.uint32))
    return partial(find_bad_page, data, num_pages, expected)


def gather_job(rows: NDArray[np.uint8], row_bytes: int, taken: int, number: int) -> Job:
    """Random rows of one large array."""
    picks = np.random.default_rng(number).integers(0, rows.size // row_bytes, taken, np.uint64)
    out = np.zeros(taken * row_bytes, np.uint8)
    return partial(gather_rows, rows, picks * np.uint64(row_bytes), 0, taken, row_bytes, out)


def open_kernels(store: Path, threads: int, given: KernelOptions) -> Iterator[Run]:
    """All kernels in turn, each on all threads at once."""
    graph, row_bytes = HeldGraph(store), 4 * given.features
    size = min(given.frontier, graph.num_nodes)
    hops = [Frontier(graph, size, given.fanout, number) for number in range(threads)]
    rows = np.ones(graph.num_nodes * row_bytes, np.uint8)
    edges, copied = sum(hop.num_edges for hop in hops), threads * COPY_BYTES / 1e9
    work: dict[str, tuple[list[Job], float]] = {
        "copy_GB_per_s": ([copy_job() for _ in hops], copied),
        "crc_GB_per_s": ([crc_job() for _ in hops], copied),
        "gather_GB_per_s": (
            [gather_job(rows, row_bytes, size, number) for number in range(threads)],
            threads * size * row_bytes / 1e9,
        ),
        "sample_M_edges_per_s": ([hop.sample for hop in hops], edges / 1e6),
        "renumber_M_ids_per_s": ([hop.renumber for hop in hops], edges / 1e6),
    }

    def seconds(jobs: list[Job]) -> float:
        begun = time.perf_counter()
        for future in [pool.submit(job) for job in jobs]:
            future.result()
        return time.perf_counter() - begun

    def run() -> Mapping[str, float]:
        rates = {
            name: amount / min(seconds(jobs) for _ in range(REPEATS))
            for name, (jobs, amount) in work.items()
        }
        for name in ("crc", "gather"):
            rates[f"{name}_share_of_copy"] = rates[f"{name}_GB_per_s"] / rates["copy_GB_per_s"]
        return rates

    with ThreadPoolExecutor(threads) as pool:
        yield run


def kernels(given: KernelOptions) -> Iterator[BenchPlan]:
    store = given.store()
    sides = [Side(f"{t} threads", open_kernels, (store, t, given)) for t in given.threads]
    yield BenchPlan(sides, {"cache": "warm"})
