"""Accuracy of macro-batches against in-memory training: `python -m tools.macro_accuracy FOLDER`.

Each seed trains the same GraphSAGE once in every way: in memory, and from macro-batches of 1/8 and
1/16 of the partitions, by partitioner, with hubs and with halos.  The test accuracy over the whole
graph is averaged over the last fifth of the epochs; differences to in-memory training are paired.
Features are looked up here by node id, so that wide sparse ones need no dense rows; the loaders
decide the batches.  "Order" samples from the whole graph, and only its seeds come macro-batch by
macro-batch.  A line a run goes to `--out`; what is there already is not run again.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from blockstore.store import open_store, read_rows
from clients.torch import Batch, NeighborDataset
from tools.bench.setup import command, serving
from tools.pairs import finish, run_each
from tools.wide_sage import Features, WideSage


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained."""

    folder: str
    undirected: bool = False
    partitions: int = 64
    epochs: int = 60
    num_neighbors: tuple[int, ...] = (15, 10)
    batch_size: int = 250
    hidden: int = 128
    learning_rate: float = 0.003
    dropout: float = 0.5
    weight_decay: float = 0.0
    noise: float = 0.0  # standard deviations of Gaussian noise added to dense features


class Way(NamedTuple):
    """One way to train: a store, and what is asked of its daemon."""

    name: str
    ingest: tuple[str, ...]  # of the store
    share: int = 0  # one of so many partitions at a time; 0: all in memory
    hubs: bool = False
    halos: bool = False
    order: bool = False  # the whole graph is loaded; seeds come as if it were not


def ways(settings: Settings) -> list[Way]:
    """In memory first."""
    k = ("--partitions", str(settings.partitions))
    gap = (*k, "--hubs", "0.01", "--halo", "0.3")
    wide = (*k, "--hubs", "0.028")
    found = [Way("in memory", gap)]
    for share in (8, 16):
        found += [
            Way(f"random 1/{share}", (*k, "--partitioner", "random", "--hubs", "0"), share),
            Way(f"METIS 1/{share}", (*k, "--partitioner", "metis", "--hubs", "0"), share),
            Way(f"GAP 1/{share}", gap, share),
            Way(f"GAP + hubs 1/{share}", gap, share, hubs=True),
            Way(f"GAP + hubs 2.8 % 1/{share}", wide, share, hubs=True),
            Way(f"GAP + hubs + halo 0.3 1/{share}", gap, share, hubs=True, halos=True),
        ]
    for name, ingest in [(way.name, way.ingest) for way in found[1:4]]:
        found.append(Way(f"order of {name}", ingest, 8, order=True))
    return found


class Served:
    """The batches of a way, epoch by epoch."""

    def __init__(self, settings: Settings, endpoint: str, way: Way, seed: int) -> None:
        options: dict[str, Any] = {"plan": "minibatch"}
        if way.share:
            size = settings.partitions // way.share
            options = {"plan": "macrobatch", "macro_partitions": size}
            options |= {"hubs": way.hubs, "halos": way.halos}
        self._data = NeighborDataset(
            endpoint, "train", settings.num_neighbors, settings.batch_size, seed=seed, **options
        )
        self.steps = len(self._data)

    def epoch(self, _epoch: int) -> Iterable[Batch]:
        """Those of the next epoch."""
        return self._data

    def close(self) -> None:
        """End the session."""
        self._data.close()


class Ordered:
    """Batches from the whole graph, whose seeds come partitions by partitions."""

    def __init__(self, settings: Settings, endpoint: str, way: Way, seed: int, store: Path) -> None:
        """Deals partitions out as plan `macrobatch` does, with other draws."""
        self._settings, self._endpoint, self._seed = settings, endpoint, seed
        (node_type,) = (opened := open_store(store)).manifest.types
        count = node_type.num_partitions
        offsets = opened.side(node_type.partition_offsets_path, np.uint64, count + 1)
        ids = read_rows(opened, node_type.store_id).astype(np.int64)
        self._seeds = np.load(Path(settings.folder) / "train_idx.npy").astype(np.int64)
        self._part = np.searchsorted(offsets.astype(np.int64), ids[self._seeds], "right") - 1
        self._deal = (count, settings.partitions // way.share)
        self.steps = 0

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """A session for the seeds of each macro-batch."""
        (count, size), steps = self._deal, 0
        order = np.random.default_rng((self._seed, epoch)).permutation(count)
        for i, members in enumerate(np.split(order, range(size, count, size))):
            seeds = self._seeds[np.isin(self._part, members)]
            number = -(-seeds.size // self._settings.batch_size)
            data = NeighborDataset(
                self._endpoint, input_nodes=seeds, num_neighbors=self._settings.num_neighbors,
                batch_size=-(-seeds.size // number), plan="minibatch",
                seed=self._seed * 1_000_000 + epoch * 1000 + i,
            )  # fmt: skip
            steps += len(data)
            yield from data
            data.close()
        self.steps = steps

    def close(self) -> None:
        """Every session has ended."""


def train(settings: Settings, served: tuple[str, Path], way: Way, seed: int) -> dict[str, Any]:
    """One run: the mean test accuracy of the last fifth of the epochs, in points.

    served  endpoint of the daemon, and its store
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    features, edge_index, label, test = graph_of(settings)
    depth, num_nodes = len(settings.num_neighbors), label.numel()
    classes = int(label.max()) + 1
    model = WideSage(features, settings.hidden, classes, depth, settings.dropout)
    optimizer = torch.optim.Adam(
        model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    endpoint, store = served
    kind = partial(Ordered, store=store) if way.order else Served
    data: Served | Ordered = kind(settings, endpoint, way, seed)
    results = []
    for epoch in range(settings.epochs):
        model.train()
        for b in data.epoch(epoch):
            targets = [*accumulate(b.num_sampled_nodes[:-1])][::-1]
            out = model(b.n_id, b.edge_index, targets, [*accumulate(b.num_sampled_edges)][::-1])
            loss = functional.cross_entropy(out, label[b.n_id[: b.batch_size]])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if epoch >= settings.epochs * 4 // 5:
            model.eval()
            with torch.no_grad():
                out = model(None, edge_index, [num_nodes] * depth, [edge_index.size(1)] * depth)
            results.append(float((out.argmax(dim=1) == label)[test].double().mean()) * 100)
    data.close()
    return {
        "graph": Path(settings.folder).name, "noise": settings.noise, "way": way.name, "seed": seed,
        "accuracy": statistics.fmean(results), "steps": data.steps,
    }  # fmt: skip


@cache
def graph_of(settings: Settings) -> tuple[Features, Tensor, Tensor, Tensor]:
    """Features, edges by target, labels and test nodes, by original id."""
    folder = Path(settings.folder)
    edges = np.load(folder / "edge_index.npy").astype(np.int64)
    if settings.undirected:
        edges = np.unique(np.concatenate([edges, edges[::-1]], axis=1), axis=1)
    edges = edges[:, np.argsort(edges[1], kind="stable")]
    label = torch.from_numpy(np.load(folder / "node_label.npy").astype(np.int64))
    test = torch.from_numpy(np.load(folder / "test_idx.npy").astype(np.int64))
    return Features(folder, settings.noise), torch.from_numpy(edges), label, test


def make_stores(
    settings: Settings, work: Path, wanted: Sequence[Way]
) -> dict[tuple[str, ...], Path]:
    """A store without features for each way of ingesting."""
    bare = work / "bare"
    bare.mkdir()
    for path in Path(settings.folder).resolve().iterdir():
        if not path.name.startswith("node_feat"):
            (bare / path.name).symlink_to(path)
    stores = {}
    for i, options in enumerate(dict.fromkeys(way.ingest for way in wanted)):
        stores[options] = work / f"store-{i}"
        extra = ["--undirected"] if settings.undirected else []
        words = ["ingest", str(bare), str(stores[options]), "--block-size", "64K"]
        command("preprocess", *words, *options, *extra)
    return stores


def run_all(
    settings: Settings,
    wanted: Sequence[Way],
    seeds: Sequence[int],
    jobs: int,
    done: set[tuple[str, int]],
) -> Iterator[dict[str, Any]]:
    """Every run that is not done, seed by seed."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="macro-accuracy-")))
        served = {}
        for options, store in make_stores(settings, work, wanted).items():
            (folder := work / f"daemon-{store.name}").mkdir()
            endpoint = stack.enter_context(
                serving(store, folder, "512M", "--workers", "1", "--readers", "2")
            )
            served[options] = (endpoint, store)
        tasks = (
            (settings, served[way.ingest], way, seed)
            for seed in seeds
            for way in wanted
            if (way.name, seed) not in done
        )
        yield from run_each(train, tasks, jobs)


def main(words: list[str] | None = None) -> str:
    """Run, append lines, print the table and return it."""
    default = Settings("")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a graph in the plain layout")
    parser.add_argument("--undirected", action="store_true")
    for name in ("partitions", "epochs", "batch_size", "hidden"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(default, name))
    for name in ("learning_rate", "dropout", "weight_decay", "noise"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=float, default=getattr(default, name))
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=default.num_neighbors)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--ways", nargs="+", default=[], help="how their names begin; all if not given"
    )
    parser.add_argument("--out", type=Path, default=Path("macro-accuracy.jsonl"))
    arguments = vars(parser.parse_args(words))
    out, jobs, seeds = (arguments.pop(name) for name in ("out", "jobs", "seeds"))
    parts = arguments.pop("ways")
    arguments["num_neighbors"] = tuple(arguments["num_neighbors"])
    settings = Settings(**arguments)
    wanted = [w for w in ways(settings) if not parts or w.name.startswith(tuple(parts))]

    def runs(done: set[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        return run_all(settings, wanted, range(seeds), jobs, done)

    return finish(out, settings, runs, "in memory")


if __name__ == "__main__":
    main()
