"""The table of comparisons: loaders, stores, tasks and options.

Each iteration of a loader yields the batches of the next epoch.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

from clients import pyg
from clients.large.batch import PartitionDraws
from clients.large.dataset import LargeDataset
from clients.large.history import HistoricalEmbeddings, HistoryTables, TableSpec
from clients.micrograph.dataset import HomeDataset
from clients.ranks import Ranks
from clients.torch import HopDataset, NeighborDataset
from tools.command import stamped
from tools.compare import tasks
from tools.compare.tasks import (
    CompareOptions,
    HistoryStep,
    ServedStore,
    TrainingTask,
    fill_absent,
)


@dataclass(frozen=True)
class Way:
    """One way to train: a loader, its options, and the store that its daemon serves."""

    name: str
    loader: Callable[..., Iterable[Any]]
    against: str  # name of its baseline, perhaps its own name
    ingest: tuple[str, ...] = ()  # ingest options of its store
    options: Mapping[str, Any] = field(default_factory=dict)
    model: tuple[str, ...] = ()  # its name, if the task has several
    epochs: int = 1  # multiple of the usual number of epochs


class TrainingRun(NamedTuple):
    """The arguments from which a way makes its loader."""

    options: CompareOptions
    way: Way
    seed: int
    endpoint: str
    task: Any  # tasks.TrainingTask


def nodes(
    run: TrainingRun, data: Callable[..., Any] = NeighborDataset, **own: Any
) -> Iterable[Any]:
    options = run.options
    found: Iterable[Any] = data(
        run.endpoint, "train", options.num_neighbors, options.batch_size, seed=run.seed,
        **own, **run.way.options,
    )  # fmt: skip
    return found


large = partial(nodes, data=LargeDataset)  # steps of large batches


def _pyg_options(run: TrainingRun) -> dict[str, Any]:
    task, options = run.task, run.options
    return {
        "num_neighbors": list(options.num_neighbors), "batch_size": options.batch_size,
        "input_nodes": (task.target, task.train) if task.target else task.train,
        "shuffle": True, "transform": fill_absent,
    }  # fmt: skip


def nodes_as_pyg(run: TrainingRun) -> Iterable[Any]:
    """Our loader in place of PyG's: the one line of a script that changes."""
    return pyg.NeighborLoader(run.endpoint, seed=run.seed, **_pyg_options(run))


def pyg_nodes(run: TrainingRun) -> Iterable[Any]:
    """PyG's loader over the graph in memory."""
    loader: Iterable[Any] = NeighborLoader(run.task.data, **_pyg_options(run))
    return loader


def _link_options(run: TrainingRun) -> dict[str, Any]:
    return {
        "num_neighbors": list(run.options.num_neighbors), "edge_label_index": run.task.train,
        "neg_sampling_ratio": 1.0, "batch_size": run.options.batch_size, "shuffle": True,
        "replace": run.options.replace,
    }  # fmt: skip


def links(run: TrainingRun) -> Iterable[Any]:
    """Our loader of seed edges in place of PyG's."""
    return pyg.LinkNeighborLoader(run.endpoint, seed=run.seed, **_link_options(run))


def pyg_links(run: TrainingRun) -> Iterable[Any]:
    """PyG's loader over the training edges in memory.

    torch-sparse, PyG's fallback, draws the last neighbors of a column too rarely, except with
    `--replace`.
    """
    data = Data(edge_index=run.task.graph, num_nodes=run.task.num_nodes)
    loader: Iterable[Any] = LinkNeighborLoader(data, **_link_options(run))
    return loader


def hops(run: TrainingRun) -> Iterable[Any]:
    return HopDataset(
        run.endpoint, "train", hops=run.options.hops, batch_size=run.options.batch_size,
        seed=run.seed, **run.way.options,
    )  # fmt: skip


class OfAllRanks:
    """Steps of one trainer in place of all ranks: the batches of all ranks of a global batch."""

    def __init__(self, run: TrainingRun, data: Callable[..., Iterable[Any]]) -> None:
        ranks = tasks.HOME_RANKS
        self._ranks: list[Any] = [
            nodes(run, data, frontier="layer", rank=rank, world_size=ranks) for rank in range(ranks)
        ]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self._ranks, strict=True)

    def close(self) -> None:
        for data in self._ranks:
            data.close()


class WithHistory:
    """Steps of large batches of partitions, with tables of historical embeddings."""

    def __init__(self, run: TrainingRun, fixed: bool) -> None:
        """`fixed`: keep the tables at their initial zeros."""
        self._run, self._fixed, self.dataset = run, fixed, large(run)
        self._history: HistoricalEmbeddings | None = None

    def __iter__(self) -> Iterator[HistoryStep]:
        data, given = self.dataset, self._run.options
        assert isinstance(data, LargeDataset)
        if self._history is None:
            attached = data.attached()
            assert attached.partitions is not None
            spec = TableSpec(
                attached.resolved.fingerprint, "sage", len(given.num_neighbors) - 1,
                attached.partitions.first[-1], given.hidden, "float32",
            )  # fmt: skip
            with tempfile.NamedTemporaryFile() as file:  # the mapping outlives the name
                self._history = HistoricalEmbeddings(
                    HistoryTables(file.name, spec, Ranks()), Ranks()
                )
        history = self._history
        for batch in data:
            if history.complete:
                assert isinstance(data.current, PartitionDraws)
                history.begin(data.current)
            yield HistoryStep(batch, history)
            if history.ends_with(batch.step):
                history.end()
                if self._fixed:
                    history.tables.rows.zero_()


class Case(NamedTuple):
    """A comparison: a task, the ways to train on it, and defaults of the options."""

    about: str
    task: Callable[..., tasks.TrainingTask]
    ways: Callable[[CompareOptions], list[Way]]
    defaults: Mapping[str, Any] = MappingProxyType({})
    # returns the folder to ingest
    source: Callable[[CompareOptions, Path], Path] = tasks.changed_source
    best: bool = False  # score the epoch that is best on valid, not the mean of the last fifth


def pair(
    daemon: Callable[..., Any], pyg: Callable[..., Any]
) -> Callable[[CompareOptions], list[Way]]:
    """Two ways: a daemon against PyG's loader over the whole graph in memory."""
    return lambda _: [Way("PyG", pyg, "PyG"), Way("daemon", daemon, "PyG")]


def macro_ways(options: CompareOptions) -> list[Way]:
    """In memory, and 1/8 and 1/16 of the partitions at a time, by partitioner, hubs and halos."""
    parts = ("--block-size", "64K", "--partitions", str(options.partitions))
    gap = (*parts, "--hubs", "0.01", "--halo", "0.3")
    wide = (*parts, "--hubs", "0.028")
    plain = {n: (*parts, "--partitioner", n.lower(), "--hubs", "0") for n in ("random", "METIS")}
    base = "in memory"
    found = [Way(base, nodes, base, gap, {"plan": "minibatch"})]
    for share in (8, 16):
        kinds: list[tuple[str, tuple[str, ...], bool, bool]] = [
            *((name, ingest, False, False) for name, ingest in (*plain.items(), ("GAP", gap))),
            ("GAP + hubs", gap, True, False),
            ("GAP + hubs 2.8 %", wide, True, False),
            ("GAP + hubs + halo 0.3", gap, True, True),
        ]
        for name, ingest, hubs, halos in kinds:
            asked = {"plan": "macrobatch", "macro_partitions": options.partitions // share}
            asked |= {"hubs": hubs, "halos": halos}
            found.append(Way(f"{name} 1/{share}", nodes, base, ingest, asked))
    return found


def labor_ways(_: CompareOptions) -> list[Way]:
    """Neighbor sampling, and LABOR with keys shared by more and more draws."""
    base = "neighbor"
    ways: dict[str, dict[str, Any]] = {
        base: {},
        "labor": {"sampler": "labor"},
        "one key of all hops": {"sampler": "labor", "layer_dependency": True},
        "one key of 8 steps": {"sampler": "labor", "batch_dependency": 8},
    }
    return [Way(name, nodes, base, options=asked) for name, asked in ways.items()]


def large_ways(options: CompareOptions) -> list[Way]:
    """Minibatches, large batches with shared draws, and an 8th and a 16th of the partitions.

    Partitions are compared with macro-batches of the same ones, with a usual halo and with one
    that loads about as many rows as histories do (a second ring of neighbors).  They also train for
    twice the epochs: a step moves few of a minibatch's rows, and learns more slowly.
    """
    base = "minibatch"
    parts = ("--block-size", "64K", "--partitions", str(options.partitions), "--hubs", "0.01")
    usual, wide = ((*parts, "--halo", share) for share in ("0.3", "1"))
    asked: dict[str, Any] = {"frontier": "layer", "plan": "minibatch"}
    found = [
        Way(base, nodes, base, usual, asked),
        Way("shared (LBS)", large, base, usual, asked | {"draws": "shared"}),
    ]
    for share in (8, 16):
        some = {"macro_partitions": options.partitions // share}
        dealt = asked | some | {"draws": "partitions"}
        for name, fixed, times in (
            ("histories", False, 1), ("twice the epochs", False, 2),
            ("tables of zeros", True, 1),
        ):  # fmt: skip
            loader, name = partial(WithHistory, fixed=fixed), f"partitions (PBS) 1/{share}, {name}"
            found.append(Way(name, loader, base, usual, dealt, epochs=times))
        macro = asked | some | {"plan": "macrobatch", "hubs": True, "halos": True}
        for name, ingest in (("halo 0.3", usual), ("halo 1", wide)):
            found.append(Way(f"macro-batches 1/{share}, {name}", nodes, base, ingest, macro))
    return found


def home_ways(_options: CompareOptions) -> list[Way]:
    """A global batch divided into ranges, and by the owners of its seeds."""
    base = "data parallel"
    return [
        Way(base, partial(OfAllRanks, data=NeighborDataset), base),
        Way(
            "home", partial(OfAllRanks, data=HomeDataset), base,
            options={"owners": tasks.HOME_OWNERS},
        ),
    ]  # fmt: skip


def hop_ways(options: CompareOptions) -> list[Way]:
    """Each model on rows in any order, and on chunks of several sizes."""
    operator, _, loops = options.operator.partition("+")
    own = "--hop-loops" if loops else "--no-hop-loops"
    ingest = ("--hops", str(options.hops), "--operator", operator, own)
    found = []
    for model in options.models:
        sizes = [(0, 0), *((chunk, 0) for chunk in options.chunks)]
        sizes += [(chunk, options.redeal) for chunk in options.chunks[-1:] if options.redeal]
        for chunk, redeal in sizes:
            name = f"{model}, chunks of {chunk}" if chunk else f"{model}, rows"
            name += f", redealt every {redeal}" * bool(redeal)
            asked = {"method": "cr" if chunk else "rr", "chunk": chunk, "redeal": redeal}
            found.append(Way(name, hops, f"{model}, rows", ingest, asked, (model,)))
    return found


CASES = {
    "accuracy": Case(
        "our GraphSAGE on batches of a daemon and of PyG's NeighborLoader",
        tasks.NodeTask, pair(nodes, pyg_nodes), {"epochs": 5, "mem": "2G"},
    ),
    "drop-in": Case(
        "PyG's GraphSAGE, of several types by to_hetero, with the loader's line changed",
        tasks.PygTask, pair(nodes_as_pyg, pyg_nodes),
    ),
    "links": Case(
        "AUC in points of PyG's unsupervised GraphSAGE; the folder has train_edge.npy, "
        "test_edge.npy",
        lambda options, _: tasks.LinkTask(options), pair(links, pyg_links),
        {"seeds": 5, "epochs": 25, "steps": 400, "num_neighbors": (10, 5), "batch_size": 1024,
         "hidden": 32, "learning_rate": 0.01},
        tasks.train_edges,
    ),
    "macro": Case(
        "macro-batches against batches from the whole graph, by partitioner, hubs and halos",
        tasks.NodeTask, macro_ways, {"epochs": 60, "batch_size": 250, "jobs": 2},
    ),
    "large": Case(
        "large batches, with shared draws and of partitions with historical embeddings, against "
        "minibatches",
        tasks.LargeTask, large_ways,
        {"epochs": 30, "num_neighbors": (10, 10, 10), "mem": "1G", "hidden": 64,
         "learning_rate": 0.005},
    ),
    "labor": Case(
        "batches by LABOR against those by neighbor sampling",
        tasks.NodeTask, labor_ways, {"epochs": 20},
    ),
    "home": Case(
        "four ranks that train the seeds they own against four with a range of the batch each",
        tasks.HomeTask, home_ways,
        {"epochs": 5, "num_neighbors": (10, 10), "batch_size": 1024, "hidden": 64},
    ),
    "hops": Case(
        "models on propagated features: chunks of rows against rows in any order",
        tasks.HopTask, hop_ways,
        {"epochs": 40, "batch_size": 8000, "learning_rate": 0.01, "dropout": 0.3, "mem": "768M",
         "jobs": 2},
        best=True,
    ),
}  # fmt: skip


@cache
def task_of(case: str, options: CompareOptions, served: ServedStore) -> TrainingTask:
    return CASES[case].task(options, served)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of one epoch after another, without end."""
    while True:
        yield from loader


def train(
    case: str, options: CompareOptions, served: ServedStore, name: str, seed: int
) -> dict[str, Any]:
    """Do one run of the way with this name; returns its line of results."""
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "Using 'NeighborSampler' without")  # pyg-lib may be missing
    task = task_of(case, options, served)
    way = next(w for w in CASES[case].ways(options) if w.name == name)
    torch.manual_seed(seed)
    model = task.model(*way.model)
    optimizer = torch.optim.Adam(
        model.parameters(), options.learning_rate, weight_decay=options.weight_decay, fused=True
    )
    loader = way.loader(TrainingRun(options, way, seed, served.endpoint, task))
    epochs = options.epochs * way.epochs
    batches, some = endless(loader), options.steps // epochs
    found: list[tuple[float, float]] = []
    for epoch in range(epochs):
        model.train()
        if options.cosine:
            share = (1 + math.cos(math.pi * epoch / epochs)) / 2
            optimizer.param_groups[0]["lr"] = share * options.learning_rate
        steps = 0
        for batch in islice(batches, some) if some else loader:
            steps += 1
            loss = task.loss(model, batch)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if CASES[case].best or epoch >= epochs * 4 // 5:
            with torch.no_grad():
                found.append(task.test(model.eval()))
    data = getattr(loader, "dataset", loader)
    if hasattr(data, "close"):
        data.close()
    score = max(found)[1] if CASES[case].best else fmean(test for _, test in found)
    return stamped(
        "compare", case=case, graph=options.folder.name, way=name, against=way.against, seed=seed,
        accuracy=score, steps=steps,
        settings=asdict(options),
    )  # fmt: skip
