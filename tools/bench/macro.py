"""Epochs from macro-batches at a fraction of the memory, against the graph in memory.

`python -m tools.bench macro`: each round an epoch of every side, in turn, with a model and with one
that does nothing.  `--induced`: what sampling takes in a macro-batch whose columns were filtered
when it was read, and in whole columns with a test of each neighbor.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from blockstore.kernels.members import (
    MemberColumns,
    Members,
    add_range,
    count_members,
    draw_members,
    words_size,
)
from blockstore.kernels.picks import UNIFORM, Column, Draws, Rule
from blockstore.kernels.random import make_key
from blockstore.store import open_store
from clients.torch import Batch, NeighborDataset, Prefetcher, prefetch
from preprocess.stored import stored_edges
from tools.bench.disk import disk_limit
from tools.bench.gpu import Trainer
from tools.bench.harness import GraphOptions, Plan, Run, Side
from tools.bench.setup import command, counters, serving
from tools.member_test import draw_tested

SHARE, FANOUT, FRONTIER = 8, 10, 200_000  # of `--induced`


@dataclass(frozen=True)
class Options(GraphOptions):
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10)
    hidden: Annotated[int, "of the model"] = 128
    mem: Annotated[str, "of macro-batches"] = "400M"
    whole: Annotated[str, "in memory"] = "2G"
    threads: Annotated[int, "of the model"] = 2
    workers: int = 2
    induced: Annotated[bool, "draws from filtered columns, and with a test"] = False

    def store(self) -> Path:
        """The graph's store in 64 partitions, with hubs and halos."""
        graph = self.graph()
        store = self.folder / f"partitioned-{graph.name}"
        if not store.exists():
            parts = ("--partitions", "64", "--hubs", "0.01", "--halo", "0.3")
            command("preprocess", "ingest", str(graph), str(store), *parts)
        return store


@contextmanager
def open_epochs(
    given: Options, name: str, mem: str, hidden: int, options: Mapping[str, Any]
) -> Iterator[Run]:
    """A daemon and a trainer; `hidden` 0: batches are looked at only."""
    torch.set_num_threads(given.threads)
    (folder := given.folder / name.replace("/", "-")).mkdir(parents=True, exist_ok=True)
    with serving(given.store(), folder, mem, "--workers", str(given.workers)) as endpoint:
        data: NeighborDataset | Prefetcher[Batch]
        data = NeighborDataset(endpoint, "train", given.fanouts, given.batch_size, **options)
        trainer: Trainer | None = None
        if hidden:  # as the training scripts do
            data = prefetch(data, "cpu")
            trainer = Trainer("cpu", given.features, hidden, given.size.classes, given.fanouts)

        def run() -> Mapping[str, float]:
            before = counters(endpoint)
            begun = asked = time.perf_counter()
            waited, seeds, edges = 0.0, 0, 0
            for batch in data:
                waited += time.perf_counter() - asked
                assert batch.x is not None
                assert batch.x.size(0) >= batch.batch_size
                if trainer is not None:
                    trainer.step(batch)
                seeds += batch.batch_size
                edges += batch.edge_index.size(1)
                asked = time.perf_counter()
            seconds = time.perf_counter() - begun
            grown = {n: count - before.get(n, 0) for n, count in counters(endpoint).items()}
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


@contextmanager
def open_induced(store_path: Path) -> Iterator[Run]:
    """Seconds to filter the columns of a macro-batch, and to draw from them, or with a test."""
    store = open_store(store_path)
    (node_type,), (relation,) = store.manifest.types, store.manifest.relations
    pieces = [(e.targets.copy(), e.sources.copy()) for e in stored_edges(store, relation, 1 << 20)]
    targets, sources = (np.concatenate(ends) for ends in zip(*pieces, strict=True))
    degrees = np.bincount(targets, minlength=node_type.num_nodes)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    k = node_type.num_partitions
    offsets = store.side(node_type.partition_offsets_path, np.uint64, k + 1).astype(np.int64)
    words = np.zeros(words_size(node_type.num_nodes), np.uint64)
    add_range(words, 0, int(offsets[k // SHARE]))
    members = int(count_members(words))
    mine = slice(0, int(indptr[members]))  # the first partitions: columns 0 to members - 1
    inner = sources[mine][sources[mine] < members]
    nodes = np.random.default_rng(0).choice(inner, FRONTIER).astype(sources.dtype)
    draws, starts = np.empty(FRONTIER * FANOUT, sources.dtype), np.arange(FRONTIER) * FANOUT
    counts, key = np.empty(FRONTIER, np.uint32), np.uint64(make_key(0, 0, 0, 0, 0))
    none = np.empty(0, np.uint32)
    rule = Rule(FANOUT, False, UNIFORM, key, none, none.view("i8"), none.view("u8"))

    def run() -> Mapping[str, float]:
        begun = time.perf_counter()
        inside = sources[mine] < members
        kept = np.bincount(targets[mine][inside], minlength=members).astype(np.uint32)
        columns = sources[mine][inside]
        filter_s = time.perf_counter() - begun
        first = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[:-1]
        begun = time.perf_counter()
        draw_members(
            Members(words, 0, members, 0),
            MemberColumns(first, kept, columns, none, none.view("f4"), np.empty((0, 3), np.int64)),
            Column(nodes, 0, counts, rule),
            Draws(starts, draws, starts, none, rule.limits),
        )
        draw_filtered_s = time.perf_counter() - begun
        filtered = draws.copy(), counts.copy()
        begun = time.perf_counter()
        draw_tested(words, indptr, sources, nodes, FRONTIER, FANOUT, key, starts, draws, counts)
        draw_tested_s = time.perf_counter() - begun
        assert (filtered[1] == counts).all()
        used = np.arange(FANOUT) < counts[:, None]
        assert (filtered[0].reshape(-1, FANOUT)[used] == draws.reshape(-1, FANOUT)[used]).all()
        return {
            "filter_s": filter_s, "draw_filtered_s": draw_filtered_s,
            "draw_tested_s": draw_tested_s, "edges": mine.stop, "kept": int(kept.sum()),
        }  # fmt: skip

    yield run


def plans(given: Options) -> Iterator[Plan]:
    """In memory, and an eighth at a time used once and twice; without and with a model."""
    store = given.store()
    if given.induced:
        yield Plan([Side("an eighth of the partitions", open_induced, (store,))])
        return
    size = sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "in memory": (given.whole, {"plan": "minibatch"}),
        "1/8, reuse 1": (given.mem, {"plan": "macrobatch", "reuse": 1}),
        "1/8, reuse 2": (given.mem, {"plan": "macrobatch", "reuse": 2}),
    }
    sides = []
    for hidden, model in ((0, "loading"), (given.hidden, "model")):
        for way, (mem, options) in ways.items():
            name = f"{way}, {model}"
            sides.append(Side(name, open_epochs, (given, name, mem, hidden, options)))
    yield Plan(sides, {"store_MB": size / 1e6, "disk_GB_per_s": disk_limit(store)})
