"""Epochs from macro-batches at a fraction of the memory, against the graph in memory.

Each round is an epoch of every side, with a model and with one that does nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tools.bench.disk import disk_limit
from tools.bench.epochs import ServedEpochs, open_epochs
from tools.bench.harness import BenchPlan, GraphOptions, Side
from tools.bench.setup import command


@dataclass(frozen=True)
class Options(GraphOptions):
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10)
    hidden: Annotated[int, "of the model"] = 128
    mem: Annotated[str, "of macro-batches"] = "400M"
    whole: Annotated[str, "in memory"] = "2G"
    threads: Annotated[int, "of the model"] = 2
    workers: int = 2

    def store(self) -> Path:
        """The graph's store in 64 partitions, with hubs and halos."""
        graph = self.graph()
        store = self.folder / f"partitioned-{graph.name}"
        if not store.exists():
            parts = ("--partitions", "64", "--hubs", "0.01", "--halo", "0.3")
            command("preprocess", "ingest", str(graph), str(store), *parts)
        return store


def plans(given: Options) -> Iterator[BenchPlan]:
    """In memory, and an eighth at a time used once and twice; without and with a model."""
    store = given.store()
    size = sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "in memory": (given.whole, {"plan": "minibatch"}),
        "1/8, reuse 1": (given.mem, {"plan": "macrobatch", "reuse": 1}),
        "1/8, reuse 2": (given.mem, {"plan": "macrobatch", "reuse": 2}),
    }
    sides = []
    trained = (given.features, given.hidden, given.size.classes)
    for model, name in (((0, 0, 0), "loading"), (trained, "model")):
        for way, (mem, options) in ways.items():
            options |= {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
            workers = ("--workers", str(given.workers))
            served = ServedEpochs(
                store, mem, options, workers, model=model, threads=given.threads
            )  # fmt: skip
            sides.append(Side(f"{way}, {name}", open_epochs, (served,)))
    yield BenchPlan(sides, {"store_MB": size / 1e6, "disk_GB_per_s": disk_limit(store)})
