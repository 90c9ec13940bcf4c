"""What a minibatch touches, for each order of nodes: `python -m tools.layout STORE...`.

The same seeds are sampled from every store, by the daemon's own topology: graph blocks that are
held, feature blocks and pages with a row that is needed, and what reading these by runs of pages
costs, for single minibatches and for `--together` of them.  Prints a Markdown table, and a JSON
line a store to `--out`.
"""

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, NodeType, row_geometry
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from blockstore.kernels.rowcache import plan_extents
from blockstore.pool import BlockPool
from blockstore.store import Store, open_store, read_rows
from blockstore.units import parse_bytes
from loaderd.batch.topology import Topology
from loaderd.devicecost import FLASH, RUN_BYTES
from loaderd.memory.ledger import ServedRows, make_sizes, served_rows
from loaderd.memory.reservation import Account, Reservation
from loaderd.memory.residency import Held, Residency
from loaderd.memory.workspace import (
    Carver,
    Workspace,
    carve_workspace,
    clear_workspace,
    workspace_bytes,
)
from loaderd.plans.base import Part, Unit
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from loaderd.plans.roots import node_roots
from loaderd.protocol import Resolved
from tools.bench.harness import spread
from tools.machine import machine, today


class Task(NamedTuple):
    """What is sampled from every store."""

    fanouts: tuple[int, ...]
    batch_size: int
    batches: int
    together: int
    seed: int
    split: str = "train"


class Extents(NamedTuple):
    """Rows of a type as they lie on disk, all served arrays together."""

    blocks: int
    pages: int
    runs: int  # that are read, near ones in one
    read_bytes: int  # by these runs


class Watched(Residency):
    """Notes the blocks that are held; no file is ever held whole."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: list[NDArray[np.int64]] = []  # since the caller last cleared it

    def hold_file(self, file: int) -> bool:  # noqa: ARG002
        """Never: blocks are asked for one by one."""
        return False

    def hold(
        self, file: int, blocks: NDArray[np.int64], min_age: int = 0, account: Account | None = None
    ) -> Held:
        """As ever, and noted."""
        self.held.append(blocks + (file << 40))
        return super().hold(file, blocks, min_age, account)


@contextlib.contextmanager
def watched_topology(store: Store, mem_bytes: int) -> Iterator[tuple[Topology, Watched]]:
    """A topology of its own over graph blocks in at most `mem_bytes`."""
    files = [store.graph(r) for r in store.manifest.relations]
    slot_bytes = store.manifest.block_bytes
    num_blocks = [f.geometry.num_blocks for f in files]
    slots = max(2, min(sum(num_blocks), mem_bytes // slot_bytes))
    data = aligned_buffer(slots * slot_bytes)
    pool = BlockPool(num_blocks, slots)
    pool.add_slots(range(slots))
    with BlockReader(files, data, slot_bytes) as reader:
        reservation = Reservation(num_blocks, workers=1, worker_blocks=slots // 2)
        residency = Watched(pool, reader, 0, threading.Condition(), reservation)
        yield Topology(store, residency, data, slot_bytes), residency


def make_plan(store: Store, task: Task, num_seeds: int, seed_type: NodeType) -> MinibatchPlan:
    """Plain neighbor sampling, the same at every relation."""
    relations = store.manifest.relations
    resolved = Resolved(
        family="neighbor", fingerprint=store.manifest.fingerprint, sampler=1, seeds="layout",
        seed_type=seed_type.name, num_seeds=num_seeds,
        fanouts=tuple((fanout,) * len(relations) for fanout in task.fanouts), frontier="new",
        replace=False, weighted=False, batch_size=task.batch_size, shuffle=False, seed=task.seed,
        edge_ids=False,
    )  # fmt: skip
    bounds = GraphBounds(store.manifest.num_nodes, tuple(r.num_edges for r in relations))
    return MinibatchPlan(resolved, Part(), bounds)


def seeds_of(store: Store, node_type: NodeType, task: Task) -> NDArray[np.int64]:
    """Store ids of the first seeds of an order that is one of original ids, alike in every store.

    Raises ValueError: the split is too small.
    """
    original = np.sort(read_rows(store, node_type.splits[task.split]).astype(np.int64))
    wanted = task.batches * task.batch_size
    if original.size < wanted:
        raise ValueError(
            f"{store.path}: split {task.split!r} has {original.size} nodes, {wanted} are asked for"
        )
    chosen = np.random.default_rng(task.seed).permutation(original)[:wanted]
    found: NDArray[np.int64] = read_rows(store, node_type.store_id)[chosen].astype(np.int64)
    return found


def make_workspace(store: Store, plan: MinibatchPlan) -> Workspace:
    """Room for any batch of the plan."""
    sizes = make_sizes(store.manifest, edge_ids=False, stamp=True)
    memory = aligned_buffer(workspace_bytes(plan.shape(), sizes))
    work = carve_workspace(Carver(memory), plan.shape(), sizes)
    clear_workspace(work)
    return work


def extents_of(
    store: Store, served: ServedRows, nodes: NDArray[Any], gap_pages: int = FLASH.gap_pages
) -> Extents:
    """Where the rows of ascending store ids lie, read in runs with gaps of so many pages.

    nodes   id_dtype (num_nodes,)   of all types
    """
    geometry = row_geometry(served.array, store.manifest.block_bytes)
    first = served.node_type.first
    low, high = np.searchsorted(nodes, [first, first + served.node_type.num_nodes])
    rows = nodes[low:high] - nodes.dtype.type(first)
    runs = np.empty((rows.size, 5), np.int64)

    def plan(gap: int) -> tuple[int, int]:
        count = plan_extents(
            rows, 0, rows.size, geometry.rows_per_block, served.array.row_bytes,
            geometry.slot_bytes, geometry.blocks_per_shard, gap, RUN_BYTES // PAGE_BYTES,
            runs,
        )  # fmt: skip
        return int(count), int(runs[:count, 2].sum())

    blocks = np.unique(rows // rows.dtype.type(geometry.rows_per_block)).size
    _, pages = plan(0)
    num_runs, read = plan(gap_pages)
    return Extents(blocks, pages, num_runs, read * PAGE_BYTES)


def touched(store: Store, nodes: NDArray[Any], gap_pages: int = FLASH.gap_pages) -> Extents:
    """Where rows of all served arrays lie: `nodes` ascending store ids."""
    parts = [extents_of(store, s, nodes, gap_pages) for s in served_rows(store.manifest)]
    return Extents(*(sum(figures) for figures in zip(*parts, strict=True)))


def sample_batches(
    store: Store, task: Task, mem_bytes: int
) -> Iterator[tuple[NDArray[Any], list[NDArray[np.int64]]]]:
    """(nodes by store id, graph blocks held) of batch after batch."""
    seed_type = next(t for t in store.manifest.types if task.split in t.splits)
    seeds = seeds_of(store, seed_type, task)
    plan = make_plan(store, task, seeds.size, seed_type)
    work = make_workspace(store, plan)
    with watched_topology(store, mem_bytes) as (topology, residency):
        for step in range(task.batches):
            low, high = step * task.batch_size, (step + 1) * task.batch_size
            residency.held.clear()
            roots = node_roots(seeds, np.arange(low, high))
            structure = topology.sample(plan, Unit(0, step, low, high), work, roots)
            yield work.n_id[: structure.num_nodes].copy(), list(residency.held)


def look(path: Path, task: Task, mem_bytes: int) -> dict[str, Any]:
    """The line of a store."""
    store = open_store(path)
    held, blocks = [], []
    alone: list[Extents] = []
    several: list[Extents] = []
    rows: list[int] = []
    group: list[NDArray[Any]] = []
    for nodes, graph in sample_batches(store, task, mem_bytes):
        held.append(sum(part.size for part in graph))
        blocks.append(np.unique(np.concatenate(graph)).size)
        rows.append(nodes.size)
        alone.append(touched(store, np.sort(nodes)))
        group.append(nodes)
        if len(group) == task.together:
            several.append(touched(store, np.unique(np.concatenate(group))))
            group.clear()
    manifest = store.manifest
    line = {
        "bench": "layout", "peer": path.name, "date": today(), "machine": machine(),
        "order": manifest.order, "block_bytes": manifest.block_bytes, "together": task.together,
        "batches": task.batches, "batch_size": task.batch_size, "fanouts": list(task.fanouts),
        "all_graph_blocks": sum(r.num_blocks for r in manifest.relations),
        "all_row_blocks": sum(
            row_geometry(s.array, manifest.block_bytes).num_blocks for s in served_rows(manifest)
        ),
        "rows": spread(rows), "graph_blocks": spread(blocks), "graph_reads": spread(held),
    }  # fmt: skip
    for name, found in (("", alone), ("together_", several)):
        for figure in Extents._fields if found else ():
            line[f"{name}row_{figure}"] = spread([getattr(e, figure) for e in found])
    return line


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row for each store, medians of a minibatch."""
    together = lines[0]["together"] if lines else 1
    rows = [
        "| order, block | graph blocks | blocks a hop, summed | row blocks | row pages | "
        f"MB read | {together} together: row blocks | row pages | MB read |",
        "| --- |" + " --- |" * 8,
    ]
    for line in lines:

        def cell(name: str, of: str = "", line: dict[str, Any] = line) -> str:
            if name not in line:
                return ""
            value = line[name]["median"]
            share = f" ({value / line[of]:.0%})" if of else ""
            if name.endswith("bytes"):
                return f"{value / 1e6:,.1f}"
            return f"{value:,.0f}{share}"

        cells = [
            f"{line['order']}, {line['block_bytes'] >> 10} KiB",
            cell("graph_blocks", "all_graph_blocks"), cell("graph_reads"),
            cell("row_blocks", "all_row_blocks"), cell("row_pages"), cell("row_read_bytes"),
            cell("together_row_blocks", "all_row_blocks"), cell("together_row_pages"),
            cell("together_row_read_bytes"),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(words: list[str]) -> list[dict[str, Any]]:
    """Look at the stores; returns their lines."""
    parser = argparse.ArgumentParser(prog="tools.layout", description=__doc__)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10, 10))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--together", type=int, default=16, help="batches whose rows are one read")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mem", default="2G", help="for graph blocks")
    parser.add_argument("--out", default="")
    given = parser.parse_args(words)
    task = Task(
        tuple(given.fanouts), given.batch_size, given.batches, given.together, given.seed,
        given.split,
    )  # fmt: skip
    lines = [look(path, task, parse_bytes(given.mem)) for path in given.stores]
    print(table(lines))
    if given.out:
        with Path(given.out).open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
