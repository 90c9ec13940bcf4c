"""Large batches: rows and bytes that come for a step, and edges that are sampled for it."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from clients.large.dataset import LargeDataset
from clients.torch import NeighborDataset
from tools.bench.harness import BenchPlan, GraphOptions, Side
from tools.bench.setup import counters, serving


@dataclass(frozen=True)
class LargeOptions(GraphOptions):
    stores: Annotated[tuple[Path, ...], "instead of the generated graph's"] = ()
    mem: str = "1G"
    batch_size: int = 256
    fanouts: tuple[int, ...] = (10, 10, 10)
    frontier: str = "layer"
    large_batches: Annotated[tuple[int, ...], "steps of a large batch"] = (4, 16, 64)


def read_epoch(given: LargeOptions, store: Path, draws: str, size: int) -> Mapping[str, float]:
    """Figures of a step over one epoch; `draws`: "" for a minibatch at a time.

    `rows` and `mb` come to the trainer; `sampled` edges are drawn by the daemon, `edges` trained on
    """
    folder = given.folder / f"large-{draws}-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "num_neighbors": given.fanouts, "batch_size": given.batch_size, "frontier": given.frontier,
        "plan": "minibatch",
    }  # fmt: skip
    with serving(store, folder, given.mem) as endpoint:
        data: Any = (
            LargeDataset(endpoint, draws=draws, large_batches=size, **options)  # type: ignore[arg-type]
            if draws
            else NeighborDataset(endpoint, **options)
        )
        width = sum(spec.row_bytes for spec in data.attached().rows)
        rows = steps = edges = seeds = 0
        begun = time.perf_counter()
        for read in data.ahead():
            if read.batch is None:
                continue
            rows += read.batch.num_rows if draws else read.batch.num_nodes
            for batch in data.hand_out(read, read.batch):
                steps += 1
                edges += batch.edge_index.size(1)
                seeds += batch.batch_size
        taken_s = time.perf_counter() - begun
        sampled = counters(endpoint)["edges"]
        data.close()
    return {
        "rows": rows / steps, "mb": rows * width / steps / 1e6, "sampled": sampled / steps,
        "edges": edges / steps, "seeds_per_s": seeds / taken_s, "steps": steps,
    }  # fmt: skip


def large(given: LargeOptions) -> Iterator[BenchPlan]:
    """A minibatch at a time, and large batches with draws of each step's own or shared ones."""
    for store in given.stores or (given.store(),):
        sides = [Side("one at a time", read_epoch, (given, store, "", 1))]
        for draws in ("own", "shared")[: 2 if given.frontier == "layer" else 1]:
            sides += [
                Side(f"{draws}, {size}", read_epoch, (given, store, draws, size))
                for size in given.large_batches
            ]
        yield BenchPlan(sides, {"store": store.name}, warm=False)
