"""Trainers of one job: what each gathers, computes and exchanges if they split batches by owner."""

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any

from clients.split import SplitBatch, SplitDataset
from clients.torch import NeighborDataset
from loaderd.cli.advise.owners import exchanged_bytes
from tools.bench.harness import BenchPlan, GraphOptions, Side
from tools.bench.setup import counters, serving

BEGIN_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class SplitOptions(GraphOptions):
    stores: Annotated[tuple[Path, ...], "instead of the generated graph's"] = ()
    maps: Annotated[tuple[str, ...], "owner maps of the store, each with an owner a trainer"] = ()
    trainers: int = 4
    mem: str = "1G"
    batch_size: Annotated[int, "of a trainer"] = 1000
    fanouts: tuple[int, ...] = (10, 10, 10)
    steps: int = 20
    hidden: Annotated[int, "width of the layers, of whose rows the exchanges are computed"] = 256


def bytes_of_exchanges(batch: SplitBatch, hidden: int) -> int:
    """That come to a trainer for a step of a model with as many layers as hops; frontier "new"."""
    assert batch.x is not None
    needed = list(accumulate(exchange.recv.numel() for exchange in batch.exchanges))
    return exchanged_bytes(needed, batch.x.size(1) * batch.x.element_size(), hidden)


def _train(
    endpoint: str, given: SplitOptions, name: str, rank: int, world: int, go: Barrier, out: Any
) -> None:
    """One trainer: rows gathered, edges, bytes exchanged; `name`: of a map, or "" for none."""
    size = given.batch_size * given.trainers
    options: dict[str, Any] = {"num_neighbors": given.fanouts, "batch_size": size}
    data: Any = (
        SplitDataset(endpoint, owners=name, owner=rank, num_owners=world, **options)
        if name
        else NeighborDataset(endpoint, rank=rank, world_size=world, **options)
    )
    batches, rows, edges, exchanged, seeds = iter(data), 0, 0, 0, 0
    go.wait(BEGIN_S)
    begun = time.perf_counter()
    for _, batch in zip(range(given.steps), batches, strict=False):
        rows += batch.n_id.numel()
        edges += batch.edge_index.size(1)
        seeds += batch.batch_size
        exchanged += bytes_of_exchanges(batch, given.hidden) if name else 0
    out.put((rows, edges, exchanged, seeds, time.perf_counter() - begun))


def run_trainers(given: SplitOptions, store: Path, name: str, world: int) -> Mapping[str, float]:
    """All trainers of a job, with a daemon that has nothing in memory yet; figures of a step."""
    folder = given.folder / f"split-{name}-{world}"
    folder.mkdir(parents=True, exist_ok=True)
    with serving(store, folder, given.mem) as endpoint:
        go, out = _CONTEXT.Barrier(world), _CONTEXT.SimpleQueue()
        running = [
            _CONTEXT.Process(target=_train, args=(endpoint, given, name, rank, world, go, out))
            for rank in range(world)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a trainer of {name or 'ordinary batches'} failed")
        found = [out.get() for _ in running]
        read = counters(endpoint)["bytes_read"]
    rows, edges, exchanged, seeds, _ = (sum(column) for column in zip(*found, strict=True))
    slowest, steps = max(each[-1] for each in found), given.steps
    return {
        "rows": rows / steps, "most_rows": max(each[0] for each in found) / steps,
        "edges": edges / steps, "most_edges": max(each[1] for each in found) / steps,
        "exchanged_bytes": exchanged / steps, "kb_read_a_seed": read / seeds / 1e3,
        "seeds_per_s": seeds / slowest,
    }  # fmt: skip


def split(given: SplitOptions) -> Iterator[BenchPlan]:
    """One process, ordinary ranks of a job, and owners of each map: the same batches for all.

    Nothing is trained: bytes exchanged follow from the batches.  `most`: of one trainer.
    """
    for store in given.stores or (given.store(),):
        count = given.trainers
        sides = [
            Side("one process", run_trainers, (given, store, "", 1)),
            Side("data parallel", run_trainers, (given, store, "", count)),
            *(Side(f"split {m}", run_trainers, (given, store, m, count)) for m in given.maps),
        ]
        yield BenchPlan(sides, {"store": store.name}, warm=False)
