"""Accuracy of macro-batches against in-memory training: `python -m tools.macro_accuracy FOLDER`.

Each seed trains the same GraphSAGE once in every way: in memory, and from macro-batches of 1/8 and
1/16 of the partitions, by partitioner, with hubs and with halos.  The test accuracy over the whole
graph is averaged over the last fifth of the epochs; differences to in-memory training are paired.
Features are looked up here by node id, so that wide sparse ones need no dense rows; the loaders
decide the batches.  A line a run goes to `--out`; what is there already is not run again.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.models import SageLayer, mean_of_neighbors
from clients.torch import NeighborDataset
from tools.bench.setup import command, serving
from tools.pairs import finish
from tools.sparse_rows import sparse_gradient, sparse_times


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
    noise: float = 0.0  # standard deviations of Gaussian noise added to dense features


class Way(NamedTuple):
    """One way to train: a store, and what is asked of its daemon."""

    name: str
    ingest: tuple[str, ...]  # of the store
    share: int = 0  # one of so many partitions at a time; 0: all in memory
    hubs: bool = False
    halos: bool = False


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
    return found


class _SparseTimes(torch.autograd.Function):
    """Rows of a sparse matrix times a weight; torch's embedding bag takes ten times as long."""

    @staticmethod
    def forward(context: Any, weight: Tensor, nodes: Any, matrix: tuple[Any, ...]) -> Tensor:
        context.nodes, context.matrix, context.rows = nodes, matrix, weight.size(0)
        out = torch.empty(nodes.size, weight.size(1))
        sparse_times(nodes, *matrix, weight.detach().numpy(), out.numpy())
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out = torch.empty(context.rows, gradients[0].size(1))
        gradient = gradients[0].contiguous().numpy()
        sparse_gradient(context.nodes, *context.matrix, gradient, out.numpy())
        return out, None, None


class Features:
    """Features of all nodes, dense or sparse, and their product with a weight."""

    def __init__(self, folder: Path, noise: float) -> None:
        self._dense: Tensor | None = None
        if (folder / "node_feat.npy").exists():
            x = np.load(folder / "node_feat.npy").astype(np.float32)
            if noise:
                rng = np.random.default_rng(0)
                x += noise * x.std() * rng.standard_normal(x.shape, np.float32)
            self._dense, self.width = torch.from_numpy(x), x.shape[1]
            return
        names = ("indptr", "indices", "data")
        self._matrix = tuple(np.load(folder / f"node_feat_{n}.npy") for n in names)
        self.width = json.loads((folder / "node_feat_csr.json").read_text())["shape"][1]

    def times(self, nodes: Tensor | None, weight: Tensor) -> Tensor:
        """(nodes, width) @ weight (width, columns); None: of all nodes."""
        if self._dense is not None:
            return (self._dense if nodes is None else self._dense[nodes]) @ weight
        own = np.arange(self._matrix[0].size - 1) if nodes is None else nodes.numpy()
        product: Tensor = _SparseTimes.apply(weight, own, self._matrix)  # type: ignore[no-untyped-call]
        return product


class Sage(nn.Module):
    """GraphSAGE as `clients.models` has it, on features that are looked up by id."""

    def __init__(self, features: Features, hidden: int, classes: int) -> None:
        super().__init__()
        self._features = features
        bound = features.width**-0.5
        self.neighbor, self.own = (
            nn.Parameter(torch.empty(features.width, hidden).uniform_(-bound, bound))
            for _ in range(2)
        )
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))
        self.last = SageLayer(hidden, classes)

    def forward(
        self, nodes: Tensor | None, edge_index: Tensor, inner: int, edges: int, seeds: int
    ) -> Tensor:
        """Logits of the first `seeds` nodes; the first `inner` have the first layer's edges."""
        message = self._features.times(nodes, self.neighbor)
        mean = mean_of_neighbors(message, edge_index, inner)
        own = self._features.times(None if nodes is None else nodes[:inner], self.own)
        h = functional.relu(mean + own + self.bias)
        h = functional.dropout(h, 0.5, self.training)
        out: Tensor = self.last(h, edge_index[:, :edges], seeds)
        return out


def train(settings: Settings, endpoint: str, way: Way, seed: int) -> dict[str, Any]:
    """One run: the mean test accuracy of the last fifth of the epochs, in points."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder = Path(settings.folder)
    features, edge_index, label, test = graph_of(settings)
    model = Sage(features, settings.hidden, int(label.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, fused=True)
    options: dict[str, Any] = {"plan": "minibatch"}
    if way.share:
        size = settings.partitions // way.share
        options = {"plan": "macrobatch", "macro_partitions": size}
        options |= {"hubs": way.hubs, "halos": way.halos}
    data = NeighborDataset(
        endpoint, "train", settings.num_neighbors, settings.batch_size, seed, **options
    )
    results, num_nodes = [], label.numel()
    for epoch in range(settings.epochs):
        model.train()
        for b in data:
            reach = b.num_sampled_nodes[0] + b.num_sampled_nodes[1]
            out = model(b.n_id, b.edge_index, reach, b.num_sampled_edges[0], b.batch_size)
            loss = functional.cross_entropy(out, label[b.n_id[: b.batch_size]])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if epoch >= settings.epochs * 4 // 5:
            model.eval()
            with torch.no_grad():
                out = model(None, edge_index, num_nodes, edge_index.size(1), num_nodes)
            results.append(float((out.argmax(dim=1) == label)[test].double().mean()) * 100)
    steps = len(data)
    data.close()
    return {
        "graph": folder.name, "noise": settings.noise, "way": way.name, "seed": seed,
        "accuracy": statistics.fmean(results), "steps": steps,
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
        endpoints = {}
        for options, store in make_stores(settings, work, wanted).items():
            (folder := work / f"daemon-{store.name}").mkdir()
            endpoints[options] = stack.enter_context(
                serving(store, folder, "512M", "--workers", "1", "--readers", "2")
            )
        pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=get_context("spawn")))
        running = [
            pool.submit(train, settings, endpoints[way.ingest], way, seed)
            for seed in seeds
            for way in wanted
            if (way.name, seed) not in done
        ]
        for future in as_completed(running):
            yield future.result()


def main(words: list[str] | None = None) -> str:
    """Run, append lines, print the table and return it."""
    default = Settings("")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a graph in the plain layout")
    parser.add_argument("--undirected", action="store_true")
    for name in ("partitions", "epochs", "batch_size", "hidden"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(default, name))
    for name in ("learning_rate", "noise"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=float, default=getattr(default, name))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=[], help="parts of names; all if not given")
    parser.add_argument("--out", type=Path, default=Path("macro-accuracy.jsonl"))
    arguments = vars(parser.parse_args(words))
    out, jobs, seeds = (arguments.pop(name) for name in ("out", "jobs", "seeds"))
    parts = arguments.pop("ways")
    settings = Settings(**arguments)
    wanted = [w for w in ways(settings) if not parts or any(p in w.name for p in parts)]

    def runs(done: set[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        return run_all(settings, wanted, range(seeds), jobs, done)

    return finish(out, settings, runs, "in memory")


if __name__ == "__main__":
    main()
