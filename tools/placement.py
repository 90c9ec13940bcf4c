"""Rows and edges of each way to place seeds: `python -m tools.placement STORE --maps metis4`.

A daemon samples the global batches; what each rank would want of them is cut out and counted, so
nothing is trained.  An iteration is that of all ranks together.  Prints a Markdown table for each
map, and appends JSON lines to `--out`.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockstore.owners import read_owners
from blockstore.store import open_store, read_rows
from clients.cut import BatchCutter
from clients.torch import Batch, NeighborDataset
from loaderd.plans.home import merge_times, models_of, place_seeds, times_of
from tools.bench.setup import serving
from tools.command import append, parse, stamped, table


@dataclass(frozen=True)
class PlacementOptions:
    store: Path
    maps: Annotated[tuple[str, ...], "owner maps of the store, each with an owner a rank"] = ()
    split: str = "train"
    batch_size: Annotated[int, "of a rank"] = 256
    fanouts: tuple[int, ...] = (10, 10, 10)
    steps: int = 5
    cache: Annotated[
        float, "of the rows of others a rank holds the hottest, by earlier batches"
    ] = 0.1
    mem: str = "1G"
    out: Annotated[Path | None, "append a line of JSON for each way"] = None


class Counts(NamedTuple):
    """Of all ranks together, in some iterations."""

    wanted: int = 0  # rows, those of each batch
    distinct: int = 0  # those of each rank: what a rank that gathers an iteration at once brings in
    remote: int = 0  # of the wanted ones, those that another rank owns
    fetched: int = 0  # of the distinct ones, likewise
    missed: int = 0  # of these, the ones that the rank's cache does not hold
    edges: int = 0  # that are computed


Group = tuple[int, NDArray[np.int64]]  # rank, places of its seeds in the global batch


def count(
    cutter: BatchCutter, owner: NDArray[Any], held: NDArray[np.bool_], groups: Sequence[Group]
) -> Counts:
    """What the ranks want and compute of one global batch.

    owner   any integers (nodes,)   of the batch's nodes
    held    (ranks, nodes)          rows of others that the cache of a rank holds
    """
    wanted = remote = edges = 0
    marks: dict[int, NDArray[np.bool_]] = {}
    for rank, seeds in groups:
        cut = cutter.structure(torch.from_numpy(seeds))
        nodes = np.unique(cut.nodes.numpy())
        wanted, edges = wanted + nodes.size, edges + cut.edges.numel()
        remote += int(np.count_nonzero(owner[nodes] != rank))
        marks.setdefault(rank, np.zeros(owner.size, bool))[nodes] = True
    distinct = sum(np.count_nonzero(mark) for mark in marks.values())
    others = {rank: mark & (owner != rank) for rank, mark in marks.items()}
    fetched = sum(np.count_nonzero(mark) for mark in others.values())
    missed = sum(np.count_nonzero(mark & ~held[rank]) for rank, mark in others.items())
    return Counts(wanted, int(distinct), remote, int(fetched), int(missed), edges)


def ways(owners: NDArray[Any], num_ranks: int) -> Iterator[tuple[str, list[Group]]]:
    """Each way to place the seeds of a global batch, and its groups.

    owners   any integers (seeds,)   of the seeds in the order of the batch
    """
    models, times = models_of(owners.size, num_ranks), times_of(owners, num_ranks)
    yield "data parallel", _groups(models, models)
    yield "micrographs", _groups(owners, times)
    for kept in range(num_ranks - 1, 0, -1):
        name = f"merged by server to {kept}" if kept > 1 else "home"
        yield name, _groups(owners, merge_times(times, owners, num_ranks, kept))
    for kept in range(num_ranks - 1, 0, -1):
        placed = place_seeds(owners, num_ranks, kept)
        yield f"merged by model to {kept}", _groups(placed, times_of(placed, num_ranks))


def _groups(ranks: NDArray[Any], times: NDArray[np.int64]) -> list[Group]:
    pairs = sorted(set(zip(ranks.tolist(), times.tolist(), strict=True)))
    return [(rank, np.flatnonzero((ranks == rank) & (times == time))) for rank, time in pairs]


def batches(
    given: PlacementOptions, num_ranks: int, endpoint: str, seed: int = 0
) -> Iterator[Batch]:
    data = NeighborDataset(
        endpoint, given.split, given.fanouts, given.batch_size * num_ranks, seed=seed,
        frontier="layer",
    )  # fmt: skip
    yield from (batch for _, batch in zip(range(given.steps), data, strict=False))
    data.close()


def hottest(
    given: PlacementOptions, owner: NDArray[Any], num_ranks: int, endpoint: str
) -> NDArray[np.bool_]:
    """Rows of others that each rank holds, of those that data parallelism wanted most often in
    batches of another seed: (ranks, nodes), by original id."""
    times = np.zeros(owner.size, np.int64)
    for batch in batches(given, num_ranks, endpoint, seed=1):
        cutter, models = BatchCutter(batch), models_of(batch.batch_size, num_ranks)
        for _, seeds in _groups(models, models):
            nodes = np.unique(cutter.structure(torch.from_numpy(seeds)).nodes.numpy())
            times[batch.n_id.numpy()[nodes]] += 1
    order = np.argsort(-times, kind="stable")
    held = np.zeros((num_ranks, owner.size), bool)
    for rank in range(num_ranks):
        others = order[owner[order] != rank]
        held[rank, others[: int(given.cache * others.size)]] = True
    return held


def measure(given: PlacementOptions, name: str, endpoint: str) -> dict[str, Counts]:
    """Counts of an iteration for each way, the mean of some; by one owner map."""
    store = open_store(given.store)
    found = read_owners(store, name)
    owner_of = np.empty_like(found.owner)  # by original id
    owner_of[read_rows(store, store.manifest.types[0].original_id)] = found.owner
    held = hottest(given, owner_of, found.owners, endpoint)
    totals: dict[str, list[Counts]] = {}
    for batch in batches(given, found.owners, endpoint):
        nodes = batch.n_id.numpy()
        cutter, owner, cached = BatchCutter(batch), owner_of[nodes], held[:, nodes]
        for way, groups in ways(owner[: batch.batch_size], found.owners):
            totals.setdefault(way, []).append(count(cutter, owner, cached, groups))
    return {
        way: Counts(*(sum(column) // len(each) for column in zip(*each, strict=True)))
        for way, each in totals.items()
    }


def report(given: PlacementOptions, name: str, found: dict[str, Counts]) -> None:
    """Print a table of one owner map, and append its lines."""
    head = ["placement", "wanted", "distinct", "remote", "remote, gathered once"]
    rows = [[*head, f"beside a cache of {given.cache:.0%}", "edges", "misses"]]
    for way, each in found.items():
        misses = f"{each.remote / max(each.wanted, 1):.0%}"
        rows.append([way, *(f"{value:,}" for value in each), misses])
        options = {"fanouts": given.fanouts, "batch_size": given.batch_size, "steps": given.steps,
                   "cache": given.cache}  # fmt: skip
        line = stamped("placement", store=given.store.name, map=name, way=way, **options)
        append([line | each._asdict()], given.out)
    print(f"{given.store.name}, map {name}: rows and edges of an iteration\n\n{table(rows)}\n")


def main() -> int:
    given = parse(PlacementOptions, sys.argv[1:])
    with (
        tempfile.TemporaryDirectory(prefix="placement-") as folder,
        serving(given.store, Path(folder), given.mem) as endpoint,
    ):
        for name in given.maps:
            report(given, name, measure(given, name, endpoint))
    return 0


if __name__ == "__main__":
    sys.exit(main())
