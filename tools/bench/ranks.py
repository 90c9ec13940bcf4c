"""What the ranks of a job receive and compute, by each way to divide the batches.

Nothing is trained: what ranks would exchange is computed from their batches.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from blockstore.owners import read_owners
from blockstore.store import open_store, read_rows
from clients.device.hotrows import HotRows
from clients.device.stage import PRESAMPLED
from clients.large.batch import LargeBatch, PartitionDraws
from clients.large.dataset import LargeDataset
from clients.micrograph.dataset import HomeDataset
from clients.micrograph.training import visit_batches
from clients.split import SplitBatch, SplitDataset
from clients.torch import NeighborDataset
from loaderd.cli.advise.owners import exchanged_bytes
from tools.bench.harness import BenchPlan, GraphOptions, Side
from tools.bench.setup import counters, serving


@dataclass(frozen=True)
class RankOptions(GraphOptions):
    stores: Annotated[tuple[Path, ...], "instead of the generated graph's"] = ()
    mem: str = "1G"
    batch_size: Annotated[int, "of a rank"] = 256
    fanouts: tuple[int, ...] = (10, 10, 10)

    @contextmanager
    def served(self, store: Path, name: str) -> Iterator[str]:
        """A daemon with nothing in memory yet."""
        (folder := self.folder / f"ranks-{name}").mkdir(parents=True, exist_ok=True)
        with serving(store, folder, self.mem) as endpoint:
            yield endpoint

    def open(self, kind: Any, endpoint: str, rank: int, ranks: int, **own: Any) -> Any:
        """Attach a rank's dataset, with global batches of `ranks * batch_size` seeds."""
        options = {"num_neighbors": self.fanouts, "batch_size": ranks * self.batch_size}
        if kind is not SplitDataset:
            options |= {"rank": rank, "world_size": ranks}
        data = kind(endpoint, **options | own)
        data.attached()
        return data


@dataclass(frozen=True)
class SplitOptions(RankOptions):
    maps: Annotated[tuple[str, ...], "owner maps of the store, each with an owner a trainer"] = ()
    trainers: int = 4
    batch_size: Annotated[int, "of a trainer"] = 1000
    steps: int = 20
    epochs: Annotated[int, "whole ones, in place of steps"] = 0
    think_ms: Annotated[float, "that the last rank takes for each batch"] = 0.0
    hidden: Annotated[int, "width of the layers, of whose rows the exchanges are computed"] = 256


@dataclass(frozen=True)
class LargeOptions(RankOptions):
    batch_size: Annotated[int, "of all ranks"] = 256
    frontier: str = "layer"
    large_batches: Annotated[tuple[int, ...], "steps of a large batch"] = (4, 16, 64)
    macro_partitions: Annotated[tuple[int, ...], "partitions of one; 0: an eighth"] = (0,)
    hidden: Annotated[int, "numbers a row of historical embeddings, float32"] = 128
    ranks: Annotated[tuple[int, ...], "that share each step"] = (1,)
    cache: Annotated[tuple[float, ...], "MB of a GPU's cache of rows; 0: a tenth of them"] = (0,)


@dataclass(frozen=True)
class PlacementOptions(RankOptions):
    maps: Annotated[tuple[str, ...], "owner maps of the store, each with an owner a rank"] = ()
    split: str = "train"
    steps: int = 5
    cache: Annotated[
        float, "of the rows of others a rank holds the hottest, by earlier batches"
    ] = 0.1


def read_rank(data: Any, steps: int | None, hidden: int, think_s: float = 0.0) -> Counter[str]:
    """Read an epoch, or `steps` batches of it, as one rank; returns counts.

    Among them are rows of historical embeddings that it pulls, and bytes that its peers send it in
    a step of a model with as many layers as hops.

    think_s   seconds that the rank takes for each batch
    """
    found: Counter[str] = Counter()
    with closing(data.ahead()) as ahead:
        for read in islice(ahead, steps):
            if read.batch is None:
                continue
            large = read.batch
            time.sleep(think_s)
            for step in data.hand_out(read, large):
                found["steps"] += 1
                found["seeds"] += step.batch_size
                found["edges"] += step.edge_index.size(1)
            found["rows"] += large.num_rows if isinstance(large, LargeBatch) else len(large.n_id)
            if isinstance(large, PartitionDraws):
                found["pulled"] += sum(map(len, large.pull))
            elif isinstance(large, SplitBatch):
                assert large.x is not None
                needed = list(accumulate(exchange.recv.numel() for exchange in large.exchanges))
                row_bytes = large.x.size(1) * large.x.element_size()
                found["exchanged_bytes"] += exchanged_bytes(needed, row_bytes, hidden)
    return found


def read_together(
    opened: list[Any], steps: int | None, hidden: int, epochs: int = 1, think_s: float = 0.0
) -> tuple[list[Counter[str]], float]:
    """Counts of each rank, and the seconds of all; `think_s`: of the last rank, per batch."""
    begun = time.perf_counter()

    def read(data: Any) -> Counter[str]:
        own_s = think_s if data is opened[-1] else 0.0
        return sum((read_rank(data, steps, hidden, own_s) for _ in range(epochs)), Counter())

    with ThreadPoolExecutor(len(opened)) as pool:
        found = list(pool.map(read, opened))
    return found, time.perf_counter() - begun


def run_trainers(given: SplitOptions, store: Path, name: str, world: int) -> Mapping[str, float]:
    """Figures per step of all trainers of a job.  `name`: of an owner map, or "" for none."""
    size = given.batch_size * given.trainers
    with ExitStack() as stack:
        endpoint = stack.enter_context(given.served(store, f"split-{name}-{world}"))
        opened = []
        for rank in range(world):
            kind: Any = SplitDataset if name else NeighborDataset
            own = {"owners": name, "owner": rank, "num_owners": world} if name else {}
            data = given.open(kind, endpoint, rank, world, batch_size=size, **own)
            opened.append(stack.enter_context(closing(data)))
        steps = None if given.epochs else given.steps
        found, seconds = read_together(
            opened, steps, given.hidden, given.epochs or 1, given.think_ms / 1e3
        )
        read = counters(endpoint)["bytes_read"]
    total, steps = sum(found, Counter()), found[0]["steps"]
    return {
        "rows": total["rows"] / steps, "max_rows": max(one["rows"] for one in found) / steps,
        "edges": total["edges"] / steps, "max_edges": max(one["edges"] for one in found) / steps,
        "exchanged_bytes": total["exchanged_bytes"] / steps,
        "kb_read_a_seed": read / total["seeds"] / 1e3, "seeds_per_s": total["seeds"] / seconds,
    }  # fmt: skip


def split(given: SplitOptions) -> Iterator[BenchPlan]:
    """One process, ordinary ranks of a job, and owners of each map: the same batches for all.

    `maximum`: of one trainer.
    """
    for store in given.stores or (given.store(),):
        count = given.trainers
        sides = [
            Side("one process", run_trainers, (given, store, "", 1)),
            Side("data parallel", run_trainers, (given, store, "", count)),
            *(Side(f"split {m}", run_trainers, (given, store, m, count)) for m in given.maps),
        ]
        yield BenchPlan(sides, {"store": store.name}, warm=False)


def missed_rows(data: Any, cache_bytes: int, row_bytes: int) -> int:
    """Rows of an epoch's batches that are not, or not yet, in a GPU's cache of the hottest rows.

    The hottest are chosen as by `Prefetcher`, from some batches of another epoch.
    """
    hot = HotRows(torch.device("cpu"), row_bytes)
    row = torch.zeros((1, row_bytes), dtype=torch.uint8)
    data.set_epoch(1)
    for batch in islice(data, PRESAMPLED):
        hot.count(batch.n_id)
    hot.choose(cache_bytes)
    data.set_epoch(0)
    missed = 0
    for batch in data:
        missed += int((hot.look_up(batch.n_id)[0] < 0).sum())
        hot.learn(batch.n_id, row.expand(len(batch.n_id), -1))
    return missed


def read_epoch(
    given: LargeOptions, store: Path, draws: str, size: float, ranks: int = 1
) -> Mapping[str, float]:
    """Figures per step over one epoch, of all ranks together.

    draws  "": minibatches; "cache": minibatches to devices that have a cache of rows
    size   steps of a large batch; with "partitions": partitions; with "cache": MB of the cache

    `rows` are sent to the trainers, and `pulled` rows of historical embeddings; `mb` are both, and
    `mb_rank` those of the rank with most of them.  The daemon draws `sampled` edges; `edges` are
    trained on.  `whole_rows` and `whole_pulled` are what partitions would bring without sampling:
    all inner nodes, and all nodes with an edge into these.
    """
    own: dict[str, Any] = {"frontier": given.frontier, "plan": "minibatch"}
    own["batch_size"] = given.batch_size
    kind: Any = LargeDataset if draws not in ("", "cache") else NeighborDataset
    if kind is LargeDataset:
        own["macro_partitions" if draws == "partitions" else "large_batches"] = size
        own["draws"] = draws
    with ExitStack() as stack:
        endpoint = stack.enter_context(given.served(store, f"large-{draws}-{size}-{ranks}"))

        def opened(**more: Any) -> list[Any]:
            made = [given.open(kind, endpoint, r, ranks, **own | more) for r in range(ranks)]
            return [stack.enter_context(closing(data)) for data in made]

        data = opened()
        width = sum(spec.row_bytes for spec in data[0].attached().rows)
        read, seconds = read_together(data, None, given.hidden)
        sampled = counters(endpoint)["edges"]
        if draws == "cache":
            tenth = open_store(store).manifest.num_nodes // 10 * width
            for one, rank in zip(read, data, strict=True):
                one["rows"] = missed_rows(rank, int(size * 1e6) or tenth, width)
        total, steps = sum(read, Counter()), read[0]["steps"]
        assert {one["steps"] for one in read} == {steps}
        num_bytes = [width * one["rows"] + 4 * given.hidden * one["pulled"] for one in read]
        found = {
            "rows": total["rows"] / steps, "pulled": total["pulled"] / steps,
            "mb": sum(num_bytes) / steps / 1e6, "mb_rank": max(num_bytes) / steps / 1e6,
            "sampled": sampled / steps, "edges": total["edges"] / steps,
            "seeds_per_s": total["seeds"] / seconds, "steps": steps,
        }  # fmt: skip
        if draws == "partitions":
            # batches around all nodes of the same partitions, with all their edges
            every = opened(split="all", num_neighbors=(-1,))
            large = [step.batch for one in every for step in one.ahead() if step.batch is not None]
            outside = sum(int((~batch.inner).sum()) for batch in large)
            found["whole_rows"] = sum(batch.num_rows for batch in large) / steps
            found["whole_pulled"] = (len(given.fanouts) - 1) * outside / steps
    return found


def large(given: LargeOptions) -> Iterator[BenchPlan]:
    """A minibatch at a time, without and with a GPU's cache of rows; large batches of each kind."""
    for store in given.stores or (given.store(),):
        manifest = open_store(store).manifest
        kinds: list[tuple[str, float]] = [("", 1), *(("cache", size) for size in given.cache)]
        kinds += [("own", size) for size in given.large_batches]
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


def placed_batches(
    given: PlacementOptions, endpoint: str, rank: int, ranks: int, kind: Any, **own: Any
) -> Iterator[Any]:
    """The first `steps` batches of a rank."""
    own |= {"split": given.split, "frontier": "layer"}
    with closing(given.open(kind, endpoint, rank, ranks, **own)) as data:
        yield from islice(data, given.steps)


def hottest(
    given: PlacementOptions, owner: NDArray[Any], ranks: int, endpoint: str
) -> NDArray[np.bool_]:
    """Rows of other owners in each rank's cache: (ranks, nodes), by original id.

    They are those that data parallelism used most often in batches of another random seed.
    """
    times = np.zeros(owner.size, np.int64)
    for rank in range(ranks):
        for batch in placed_batches(given, endpoint, rank, ranks, NeighborDataset, seed=1):
            times[batch.n_id.numpy()] += 1
    order = np.argsort(-times, kind="stable")
    held = np.zeros((ranks, owner.size), bool)
    for rank in range(ranks):
        others = order[owner[order] != rank]
        held[rank, others[: int(given.cache * others.size)]] = True
    return held


def place(
    given: PlacementOptions, path: Path, name: str, time_steps: int, visits: int
) -> Mapping[str, float]:
    """Figures per iteration of all ranks, with an owner map.

    time_steps   that seeds are merged into by model; 0: each stays at home; -1: data parallelism
    visits       of models to each rank; 1: a rank trains all its seeds at once

    `wanted` counts rows per visit, `distinct` per rank and iteration.  Of these, `remote` and
    `fetched` have another owner; `missed` are fetched ones that are not in the rank's cache.
    """
    store = open_store(path)
    owners = read_owners(store, name)
    owner = np.empty_like(owners.owner)  # by original id
    owner[read_rows(store, store.manifest.types[0].original_id)] = owners.owner
    found, ranks = Counter[str](), owners.owners
    own = {"owners": name, "time_steps": time_steps} if time_steps >= 0 else {}
    kind: Any = HomeDataset if own else NeighborDataset
    with given.served(path, f"placement-{name}-{time_steps}-{visits}") as endpoint:
        held = hottest(given, owner, ranks, endpoint)
        for rank in range(ranks):
            for batch in placed_batches(given, endpoint, rank, ranks, kind, **own):
                parts = [batch]
                if visits > 1:
                    parts = [part for _, part in visit_batches(batch, rank, ranks, visits)]
                wanted = np.concatenate([part.n_id.numpy() for part in parts])
                distinct = np.unique(wanted)
                fetched = distinct[owner[distinct] != rank]
                found["wanted"] += wanted.size
                found["distinct"] += distinct.size
                found["remote"] += int(np.count_nonzero(owner[wanted] != rank))
                found["fetched"] += fetched.size
                found["missed"] += int(np.count_nonzero(~held[rank, fetched]))
                found["edges"] += sum(part.edge_index.size(1) for part in parts)
    figures = {figure: count / given.steps for figure, count in found.items()}
    return figures | {"remote_share": found["remote"] / found["wanted"]}


def placement(given: PlacementOptions) -> Iterator[BenchPlan]:
    """Rows and edges of an iteration of all ranks, by each way to place the seeds."""
    for store in given.stores or (given.store(),):
        for name in given.maps:
            ranks = read_owners(open_store(store), name).owners
            ways = {"data parallel": (-1, 1), "micrographs": (0, ranks)}
            for kept in range(ranks - 1, 0, -1):
                ways[f"merged by server to {kept}" if kept > 1 else "home"] = (0, kept)
            ways |= {f"merged by model to {k}": (k, ranks) for k in range(ranks - 1, 0, -1)}
            sides = [Side(way, place, (given, store, name, *how)) for way, how in ways.items()]
            yield BenchPlan(sides, {"store": store.name, "map": name}, warm=False)
