"""Large batches: rows and bytes that come for a step, and edges that are sampled for it."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from blockstore.store import open_store
from clients.large.batch import LargeBatch, PartitionDraws
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
    macro_partitions: Annotated[tuple[int, ...], "partitions of one; 0: an eighth"] = (0,)
    hidden: Annotated[int, "numbers a row of historical embeddings, float32"] = 128
    ranks: Annotated[tuple[int, ...], "that share each step"] = (1,)


class _Read(NamedTuple):
    """What one rank read in an epoch."""

    steps: int
    seeds: int
    edges: int
    rows: int
    pulled: int  # rows of tables of historical embeddings


def read_epoch(
    given: LargeOptions, store: Path, draws: str, size: int, ranks: int = 1
) -> Mapping[str, float]:
    """Figures of a step over one epoch, of all ranks together; `draws`: "" for minibatches.

    size   steps of a large batch; of draws "partitions": partitions

    `rows` come to the trainers, and `pulled` rows of historical embeddings; `mb` are both, and
    `mb_rank` those of the rank with most of them.  The daemon draws `sampled` edges; `edges` are
    trained on.  `whole_rows` and `whole_pulled` are what partitions would bring without the filter:
    all inner nodes, and all nodes with an edge into these.
    """
    folder = given.folder / f"large-{draws}-{size}-{ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    with serving(store, folder, given.mem) as endpoint:
        opened = [_open(given, endpoint, draws, size, rank, ranks) for rank in range(ranks)]
        width = sum(spec.row_bytes for spec in opened[0].attached().rows)
        begun = time.perf_counter()
        with ThreadPoolExecutor(ranks) as pool:
            read = list(pool.map(_read, opened))
        taken_s = time.perf_counter() - begun
        sampled, steps = counters(endpoint)["edges"], read[0].steps
        assert {one.steps for one in read} == {steps}
        num_bytes = [width * one.rows + 4 * given.hidden * one.pulled for one in read]
        found = {
            "rows": sum(one.rows for one in read) / steps,
            "pulled": sum(one.pulled for one in read) / steps,
            "mb": sum(num_bytes) / steps / 1e6, "mb_rank": max(num_bytes) / steps / 1e6,
            "sampled": sampled / steps, "edges": sum(one.edges for one in read) / steps,
            "seeds_per_s": sum(one.seeds for one in read) / taken_s, "steps": steps,
        }  # fmt: skip
        if draws == "partitions":
            # around all nodes of the same partitions, with all their edges
            every = {"split": "all", "num_neighbors": (-1,)}
            data = [_open(given, endpoint, draws, size, r, ranks, **every) for r in range(ranks)]
            large = [step.batch for one in data for step in one.ahead() if step.batch is not None]
            outside = sum(int((~batch.inner).sum()) for batch in large)
            found["whole_rows"] = sum(batch.num_rows for batch in large) / steps
            found["whole_pulled"] = (len(given.fanouts) - 1) * outside / steps
            opened += data
        for one in opened:
            one.close()
    return found


def _open(
    given: LargeOptions, endpoint: str, draws: str, size: int, rank: int, ranks: int, **own: Any
) -> Any:
    """A rank's data; it attaches at once."""
    options: dict[str, Any] = {
        "num_neighbors": given.fanouts, "batch_size": given.batch_size, "frontier": given.frontier,
        "plan": "minibatch", "rank": rank, "world_size": ranks, **own,
    }  # fmt: skip
    if draws:
        options |= {"macro_partitions" if draws == "partitions" else "large_batches": size}
        data: Any = LargeDataset(endpoint, draws=draws, **options)  # type: ignore[arg-type]
    else:
        data = NeighborDataset(endpoint, **options)
    data.attached()
    return data


def _read(data: Any) -> _Read:
    found = _Read(0, 0, 0, 0, 0)
    for read in data.ahead():
        if read.batch is None:
            continue
        large, steps = read.batch, list(data.hand_out(read, read.batch))
        found = _Read(
            found.steps + len(steps),
            found.seeds + sum(step.batch_size for step in steps),
            found.edges + sum(step.edge_index.size(1) for step in steps),
            found.rows + (large.num_rows if isinstance(large, LargeBatch) else large.num_nodes),
            found.pulled + sum(map(len, large.pull if isinstance(large, PartitionDraws) else ())),
        )
    return found


def large(given: LargeOptions) -> Iterator[BenchPlan]:
    """A minibatch at a time; large batches with draws of each step, shared, or of partitions."""
    for store in given.stores or (given.store(),):
        manifest = open_store(store).manifest
        kinds = [("", 1), *(("own", size) for size in given.large_batches)]
        if given.frontier == "layer":
            kinds += [("shared", size) for size in given.large_batches]
            parts = given.macro_partitions if manifest.types[0].num_partitions else ()
            kinds += [("partitions", size) for size in parts]
        sides = [
            Side(
                f"{draws or 'one at a time'}, {size}, {ranks} ranks",
                read_epoch, (given, store, draws, size, ranks),
            )
            for ranks in given.ranks
            for draws, size in kinds
        ]  # fmt: skip
        yield BenchPlan(sides, {"store": store.name}, warm=False)
