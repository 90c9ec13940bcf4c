"""Measure rates of a disk and of the kernels on this machine, each alone, in a minute."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from blockstore.format import PAGE_BYTES, edge_layout
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader, make_transit
from blockstore.kernels.columns import view_blocks
from blockstore.kernels.members import (
    MemberColumns,
    Members,
    WantedMembers,
    filter_block,
    words_size,
)
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.rows import gather_rows
from blockstore.store import Store, open_store, scan_blocks
from clients.torch import NeighborDataset
from loaderd.memory.ledger import served_rows
from loaderd.monitoring.devicecost import RUN_BYTES, DeviceCost, measure_cost
from loaderd.sampling.hyperbatch.entries import Needs, table_bytes
from loaderd.sampling.hyperbatch.regions import (
    CacheShare,
    StayingRegions,
    area_slots_of,
    rows_by_type,
)
from loaderd.sampling.hyperbatch.rowcache import RowCache
from loaderd.sampling.rows import ServedFiles
from preprocess.errors import BadInput
from tools.bench.disk import DEPTH, make_file
from tools.bench.resources import cpu_seconds, descendants
from tools.bench.setup import make_store, serving
from tools.rmat import generate

_NODES, _PAIRS, _WIDTH = 500_000, 8_000_000, 128
# (fanouts, batch size) with few and many columns, edges and nodes, to solve for their rates
_SHAPES = (
    ((10, 10, 10), 1000), ((30, 30), 500), ((1, 1, 1, 1), 10_000), ((40,), 2000), ((5,), 50)
)  # fmt: skip
_DISK_BYTES, _BLOCK = 1 << 29, 1 << 20
_MIN_S = 1.0  # least CPU time to measure a rate over
_PIECE, _PIECES = 50_000, 4  # nodes of a batch, batches of a group


class KernelRates(msgspec.Struct, frozen=True):
    """Seconds per operation: CPU seconds of the thread named, except for the first two."""

    run_s: float  # the disk, with all readers at work: per further run of pages
    page_s: float  # the disk: per further page in a run
    run_cpu_s: float  # readers: per run
    page_cpu_s: float  # readers: to verify a page
    batch_s: float  # workers, and the event loop: per batch of any size
    column_s: float  # workers: to find a node's column
    edge_s: float  # workers: to draw an edge and find its source's local id
    node_s: float  # workers: per node of a batch, including the address of its row
    note_s: float  # the gather thread: to check whether a node's row is present, and note its use
    bring_s: float  # the gather thread: to find room for an absent row, and plan its read
    client_batch_s: float  # the client: per batch
    client_edge_s: float  # the client: to copy an edge
    client_node_s: float  # the client: per node, without its row
    byte_s: float  # to gather a byte of a row
    filter_s: float  # macro-batches: to check whether an edge's source is a member

    @property
    def disk(self) -> DeviceCost:
        return DeviceCost(self.run_s, self.page_s)


def load_rates(path: Path) -> KernelRates:
    """Load saved rates.  Raises BadInput: no such file; ValueError: it holds something else."""
    if not path.is_file():
        raise BadInput.at(
            str(path), "no such file", "measured rates",
            "give --rates, or measure: python -m tools.model calibrate FOLDER",
        )  # fmt: skip
    return msgspec.json.decode(path.read_bytes(), type=KernelRates)


def calibrate(folder: Path) -> KernelRates:
    """Measure in a folder on the disk in question; a graph of 0.6 GB stays there for reuse."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = folder / "rmat"
    if not graph.exists():
        generate(graph, _NODES, _PAIRS, _WIDTH, 0)
    store = make_store(folder, graph, options=("--undirected",))
    cost, reading = _disk(folder / "disk")
    taken = [_batches(store, *shape) for shape in _SHAPES]
    worker = solve_rates([t[:4] for t in taken], [t.daemon_s for t in taken])
    client_counts = [(t.batches, t.edges, t.nodes) for t in taken]
    client_batch_s, client_edge_s, row_s = solve_rates(client_counts, [t.client_s for t in taken])
    row_bytes = 4 * _WIDTH + 8  # features, and the label
    byte_s, opened = min(_copying(), row_s / row_bytes), open_store(store)
    (run_cpu_s, page_cpu_s), (batch_s, column_s, edge_s, node_s) = reading, worker
    note_s, bring_s = _gathering(opened, cost)
    return KernelRates(
        run_s=cost.run_s, page_s=cost.page_s, run_cpu_s=run_cpu_s, page_cpu_s=page_cpu_s,
        batch_s=batch_s, column_s=column_s, edge_s=edge_s, node_s=node_s, note_s=note_s,
        bring_s=bring_s, client_batch_s=client_batch_s, client_edge_s=client_edge_s,
        client_node_s=row_s - row_bytes * byte_s, byte_s=byte_s, filter_s=_filtering(opened),
    )  # fmt: skip


def solve_rates(counts: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Least-squares rates >= 0 of each count; shapes have equal weight, however long they took."""
    taken = np.array(seconds)
    left, known = np.array(counts) / taken[:, np.newaxis], np.arange(len(counts[0]))
    found = np.zeros(known.size)
    while known.size:
        own = np.linalg.lstsq(left[:, known], np.ones(taken.size), rcond=None)[0]
        if own.min() >= 0:
            found[known] = own
            break
        known = np.delete(known, own.argmin())
    return found.tolist()


def _disk(path: Path) -> tuple[DeviceCost, tuple[float, float]]:
    """The cost of reads, in seconds and in CPU seconds per run and page."""
    file = make_file(path, _DISK_BYTES, _BLOCK)
    memory = aligned_buffer(DEPTH * RUN_BYTES)
    buffers = np.split(memory, DEPTH)
    try:
        with BlockReader([file], memory, RUN_BYTES, DEPTH) as reader:
            cost, transit = measure_cost(reader, 0, file, buffers), make_transit(buffers)
            long = RUN_BYTES // PAGE_BYTES

            def cpu_s(pages: int) -> float:
                runs = np.zeros((_DISK_BYTES // RUN_BYTES, 3), np.int64)
                runs[:, 1], runs[:, 2] = np.arange(len(runs)) * long, pages
                begun = time.process_time()
                reader.stream(0, runs, transit, lambda _low, _high, _data: None).wait()
                return (time.process_time() - begun) / len(runs)

            short, whole = cpu_s(1), cpu_s(long)
            page_s = (whole - short) / (long - 1)
            return cost, (max(0.0, short - page_s), page_s)
    finally:
        path.unlink()


def _copying() -> float:
    """Seconds to gather a byte of rows, from rows of two widths within 256 MB."""
    data, count = np.ones(1 << 28, np.uint8), 100_000

    def seconds(width: int) -> float:
        places = np.random.default_rng(width).integers(0, data.size // width, (6, count)) * width
        out, taken = np.empty(count * width, np.uint8), []
        for at in places.astype(np.uint64):
            begun = time.thread_time()
            gather_rows(data, at, 0, count, width, out)
            taken.append(time.thread_time() - begun)
        return min(taken)

    wide, narrow = 512, 8
    return (seconds(wide) - seconds(narrow)) / count / (wide - narrow)


def _gathering(store: Store, cost: DeviceCost) -> tuple[float, float]:
    """Seconds of the hyperbatch gather thread per node, and per row that it loads.

    The daemon's row cache loads groups of batches: first with absent rows, then the same again.
    """
    served = served_rows(store.manifest)
    types, entries = rows_by_type(served), 2 * _PIECE * _PIECES
    shares, slot = [CacheShare(entries=entries)], _BLOCK
    rows = area_slots_of(types, [entries], slot)
    tables = -(-table_bytes(types, store.manifest.id_dtype, shares) // slot)
    data = aligned_buffer((rows + tables + DEPTH) * slot)
    transit = np.split(data[(rows + tables) * slot :], DEPTH)
    draw, ids = np.random.default_rng(0), store.manifest.id_dtype
    with BlockReader([store.rows(r.array) for r in served], data, slot, DEPTH) as reader:
        files = ServedFiles(served, reader, 0, data, slot, store.manifest.block_bytes, ids)
        cache = RowCache(
            files, shares, data[rows * slot : (rows + tables) * slot], range(rows), transit, cost,
            StayingRegions(served, slot).join(),
        )  # fmt: skip
        cache.begin_run()
        absent, present, brought = 0.0, 0.0, 0
        for number in range(0, 8 * _PIECES, 2 * _PIECES):
            nodes = [draw.permutation(_NODES)[:_PIECE].astype(ids) for _ in range(_PIECES)]
            for again in (0, _PIECES):
                first, before = number + again, cache.rows_read
                group = [Needs(first + i, (piece,)) for i, piece in enumerate(nodes)]
                begun = time.thread_time()
                assert cache.count_fitting(group) == _PIECES
                cache.bring(group, (), lambda known, first=first: max(first, known))  # type: ignore[misc]
                taken = time.thread_time() - begun
                if number and again:  # the first group calls each kernel for the first time
                    present += taken
                elif number:
                    absent, brought = absent + taken, brought + cache.rows_read - before
    nodes_noted = 3 * _PIECE * _PIECES
    return present / nodes_noted, max(0.0, absent - present) / brought


def _filtering(store: Store) -> float:
    """Seconds to filter an edge of a graph block if all nodes are members."""
    manifest, relation = store.manifest, store.manifest.relations[0]
    _, blocks = next(scan_blocks(store.graph(relation), _BLOCK))
    data, edges = np.array(blocks[0]), int(store.first_edge(relation)[1])
    words = np.empty((words_size(_NODES) // 2, 2), np.uint64)
    words[:, 0], words[:, 1] = ~np.uint64(0), 64 * np.arange(len(words))
    ids, none = np.dtype(manifest.id_dtype), np.empty(0, np.uint32)
    columns = MemberColumns(
        np.empty(_NODES, np.int64), np.empty(_NODES, np.uint32), np.empty(edges, ids), none,
        none.view(np.float32), EdgeRecord(), edges, np.empty((1, 3), np.int64),
    )  # fmt: skip
    layout, slot = edge_layout(manifest, relation), np.zeros(1, np.int32)
    view = view_blocks(data, layout, slot, np.empty(0, np.uint64), data.size, 0)
    wanted = WantedMembers(
        0, _NODES, np.empty(0, ids), np.empty(0, np.uint8), np.empty(0, np.int64)
    )
    members, taken = Members(words.ravel(), 0, _NODES, 0), []
    for _ in range(8):
        begun = time.thread_time()
        filter_block(view, 0, 0, wanted, members, columns, 0, 0)
        taken.append(time.thread_time() - begun)
    return min(taken) / edges


class _Taken(NamedTuple):
    """Counts and times of some batches."""

    batches: float
    columns: float  # expanded columns
    edges: float
    nodes: float
    daemon_s: float  # CPU
    client_s: float


def _batches(store: Path, fanouts: tuple[int, ...], batch_size: int) -> _Taken:
    """Measure batches of a daemon with all in memory, after its kernels are loaded."""
    where = store.parent / "run"
    where.mkdir(exist_ok=True)
    with serving(store, where, "2G", "--workers", "2") as endpoint:
        data: Any = NeighborDataset(endpoint, num_neighbors=fanouts, batch_size=batch_size)
        for _ in data:
            pass
        daemon = [pid for pid in descendants(os.getpid()) if pid != os.getpid()]
        before, own = cpu_seconds(daemon), time.process_time()
        batches = columns = edges = nodes = 0
        while cpu_seconds(daemon) - before < _MIN_S:
            for batch in data:
                edges, nodes = edges + batch.edge_index.size(1), nodes + batch.n_id.numel()
                columns, batches = columns + sum(batch.num_sampled_nodes[:-1]), batches + 1
        taken = cpu_seconds(daemon) - before, time.process_time() - own
        data.close()
    return _Taken(batches, columns, edges, nodes, *taken)
