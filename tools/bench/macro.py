"""Epochs from macro-batches at a fraction of the memory, against the graph in memory.

`python -m tools.bench macro`: each round an epoch of every peer, in turn, with a model and with one
that does nothing.  `--induced`: what sampling takes in a macro-batch whose columns were filtered
when it was read, and in whole columns with a test of each neighbor.
"""

import argparse
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from blockstore.kernels.members import add_range, count_members, draw_members, words_size
from blockstore.kernels.random import make_key
from blockstore.store import open_store
from clients.models import GraphSage
from clients.torch import Batch, NeighborDataset, Prefetcher, prefetch
from preprocess.stored import stored_edges
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.hyperbatch import disk_limit, status
from tools.bench.setup import GraphSize, command, make_graph, serving
from tools.machine import machine, today
from tools.member_test import draw_tested


class Task(NamedTuple):
    """What every peer does an epoch of."""

    store: Path
    folder: Path
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int  # of the model; 0: batches are looked at only
    threads: int
    workers: int


@contextmanager
def open_epochs(task: Task, name: str, mem: str, options: Mapping[str, Any]) -> Iterator[Run]:
    """A daemon and a trainer."""
    torch.set_num_threads(task.threads)
    (folder := task.folder / name).mkdir(parents=True, exist_ok=True)
    with serving(task.store, folder, mem, "--workers", str(task.workers)) as endpoint:
        data: NeighborDataset | Prefetcher[Batch]
        data = NeighborDataset(endpoint, "train", task.fanouts, task.batch_size, **options)
        if task.hidden:  # as the training scripts do
            data = prefetch(data, "cpu")
        model: GraphSage | None = None
        optimizer: torch.optim.Optimizer | None = None

        def learn(batch: Batch) -> None:
            nonlocal model, optimizer
            assert batch.x is not None
            assert batch.y is not None
            if not task.hidden:
                assert batch.x.size(0) >= batch.batch_size
                return
            if model is None or optimizer is None:
                model = GraphSage(batch.x.size(1), task.hidden, 64, len(task.fanouts))
                optimizer = torch.optim.Adam(model.parameters(), fused=True)
            out = model(batch.x, batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
            loss = functional.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()

        def run() -> Mapping[str, float]:
            before = counters(endpoint)
            begun = asked = time.perf_counter()
            waited, seeds, edges = 0.0, 0, 0
            for batch in data:
                waited += time.perf_counter() - asked
                learn(batch)
                seeds += batch.batch_size
                edges += batch.edge_index.size(1)
                asked = time.perf_counter()
            seconds = time.perf_counter() - begun
            after = counters(endpoint)
            grown = {name: after[name] - before.get(name, 0) for name in after}
            return {
                "epoch_s": seconds,
                "waited": waited / seconds,
                "steps": len(data),
                "edges_per_seed": edges / seeds,
                "daemon_MB_read": grown["bytes_read"] / 1e6,
                "macro_read_s": grown.get("macro_read_ns", 0) / 1e9,
                "macro_wait_s": grown.get("macro_wait_ns", 0) / 1e9,
            }

        yield run
        data.close()


def counters(endpoint: str) -> dict[str, int]:
    """Of the daemon."""
    found: dict[str, int] = status(endpoint)["counters"]
    return found


def induced(store_path: Path, share: int, fanout: int, frontier: int) -> dict[str, Any]:
    """Seconds to filter the columns of a macro-batch, and to draw from them, or with a test."""
    store = open_store(store_path)
    manifest = store.manifest
    node_type, relation = manifest.types[0], manifest.relations[0]
    pieces = [(e.targets.copy(), e.sources.copy()) for e in stored_edges(store, relation, 1 << 20)]
    targets = np.concatenate([t for t, _ in pieces])
    sources = np.concatenate([s for _, s in pieces])
    degrees = np.bincount(targets, minlength=node_type.num_nodes)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    k = node_type.num_partitions
    offsets = store.side(node_type.partition_offsets_path, np.uint64, k + 1).astype(np.int64)
    words = np.zeros(words_size(node_type.num_nodes), np.uint64)
    add_range(words, 0, int(offsets[k // share]))
    members = int(count_members(words))
    mine = slice(0, int(indptr[members]))  # the first partitions: columns 0 to members - 1
    rng = np.random.default_rng(0)
    nodes = rng.choice(sources[mine][sources[mine] < members], frontier).astype(sources.dtype)
    draws, starts = np.empty(frontier * fanout, sources.dtype), np.arange(frontier) * fanout
    counts, key = np.empty(frontier, np.uint32), np.uint64(make_key(0, 0, 0, 0, 0))
    none = np.empty(0, np.uint32)
    times: dict[str, list[float]] = {"filter_s": [], "draw_filtered_s": [], "draw_tested_s": []}
    for _ in range(6):
        begun = time.perf_counter()
        inside = sources[mine] < members
        kept = np.bincount(targets[mine][inside], minlength=members).astype(np.uint32)
        columns = sources[mine][inside]
        times["filter_s"].append(time.perf_counter() - begun)
        first = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[:-1]
        begun = time.perf_counter()
        draw_members(
            words, 0, 0, members, first, kept, columns, none, nodes, frontier, fanout, False, key,
            starts, draws, none, counts,
        )  # fmt: skip
        times["draw_filtered_s"].append(time.perf_counter() - begun)
        filtered = draws.copy(), counts.copy()
        begun = time.perf_counter()
        draw_tested(words, indptr, sources, nodes, frontier, fanout, key, starts, draws, counts)
        times["draw_tested_s"].append(time.perf_counter() - begun)
        assert (filtered[1] == counts).all()
        used = np.arange(fanout) < counts[:, None]
        assert (filtered[0].reshape(-1, fanout)[used] == draws.reshape(-1, fanout)[used]).all()
    medians = {name: float(np.median(values[1:])) for name, values in times.items()}
    return {
        "bench": "macro induced", "date": today(), "machine": machine(), "members": members,
        "edges": int(mine.stop), "kept": int(kept.sum()), "frontier": frontier, "fanout": fanout,
        **medians,
    }  # fmt: skip


def make_partitioned(folder: Path, graph: Path, options: tuple[str, ...]) -> Path:
    """The graph's store in 64 partitions."""
    store = folder / f"partitioned-{graph.name}-{'-'.join(options).replace('--', '')}"
    if not store.exists():
        command("preprocess", "ingest", str(graph), str(store), "--partitions", "64", *options)
    return store


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench macro", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/blockstore-bench"))
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=30)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(15, 10))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--mem", default="400M", help="of macro-batches")
    parser.add_argument("--whole", default="2G", help="in memory")
    parser.add_argument("--threads", type=int, default=2, help="of the model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--induced", action="store_true")
    given = parser.parse_args(words)
    graph = make_graph(
        given.folder, GraphSize(given.nodes, given.degree, given.features, classes=16)
    )
    store = make_partitioned(given.folder, graph, ("--hubs", "0.01", "--halo", "0.3"))
    if given.induced:
        line = induced(store, 8, 10, 200_000)
        print(line)
        return [line]
    size = int(subprocess.check_output(["du", "-sb", str(store)]).split()[0])
    setting = {
        "nodes": given.nodes, "fanouts": list(given.fanouts), "batch_size": given.batch_size,
        "store_MB": size / 1e6, "disk_GB_per_s": disk_limit(store),
    }  # fmt: skip
    peers = []
    for hidden in (0, given.hidden):
        task = Task(
            store, given.folder, tuple(given.fanouts), given.batch_size, hidden, given.threads,
            given.workers,
        )  # fmt: skip
        model = "model" if hidden else "loading"
        whole = {"plan": "minibatch"}
        peers.append(
            Peer(f"in memory, {model}", open_epochs, (task, f"m{hidden}", given.whole, whole))
        )
        for reuse in (1, 2):
            options = {"plan": "macrobatch", "reuse": reuse}
            name, at = f"1/8, reuse {reuse}, {model}", f"r{reuse}-{hidden}"
            peers.append(Peer(name, open_epochs, (task, at, given.mem, options)))
    return report("macro", setting, measure(peers, given.rounds), given.out)
