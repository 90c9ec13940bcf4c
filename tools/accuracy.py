"""Accuracy against PyG's in-memory NeighborLoader, in pairs: `python -m tools.accuracy FOLDER`.

Each pair trains the same model from the same initialisation, once from the daemon and once from
PyG's loader over the whole graph in memory, and evaluates both full-batch on the test split.
Reported are the mean of the differences, its standard error and the 95 % interval, in points.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from blockstore.format import Manifest
from blockstore.store import open_store, read_rows
from clients.models import GraphSage
from clients.torch import NeighborDataset
from preprocess.export.edges import columns_of
from tools.bench.setup import command, serving
from tools.machine import machine, today
from tools.pairs import interval


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison."""

    folder: str
    undirected: bool = False
    seeds: int = 10
    first_seed: int = 0
    epochs: int = 5
    num_neighbors: tuple[int, ...] = (15, 10)
    batch_size: int = 500
    hidden: int = 128
    learning_rate: float = 0.003
    noise: float = 0.0  # standard deviations of Gaussian noise added to the features


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole graph in memory, original ids."""

    data: Data
    train: Tensor
    test: Tensor
    num_classes: int


def load_graph(store_path: Path) -> Graph:
    """What the store holds, so that both sides train on the very same graph."""
    store = open_store(store_path)
    manifest: Manifest = store.manifest
    node_type = manifest.types[0]
    original = read_rows(store, node_type.original_id).astype(np.int64)
    inverse = read_rows(store, node_type.store_id).astype(np.int64)
    edges = [
        np.stack([original[sources], original[targets]])
        for targets, sources, _ in columns_of(store, manifest.relations[0])
    ]
    assert node_type.label is not None
    x = read_rows(store, next(iter(node_type.features.values())))[inverse]
    y = read_rows(store, node_type.label)[inverse]
    splits = {k: torch.from_numpy(read_rows(store, a)) for k, a in node_type.splits.items()}
    data = Data(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(np.concatenate(edges, axis=1)),
        y=torch.from_numpy(y.astype(np.int64)),
    )
    return Graph(data, splits["train"], splits["test"], int(y.max()) + 1)


def train_and_test(
    settings: Settings, graph: Graph, seed: int, epoch_of: Callable[[int], Iterable[Any]]
) -> float:
    """Test accuracy in points after training on the batches of `epoch_of`."""
    torch.manual_seed(seed)
    model = GraphSage(
        graph.data.x.size(1), settings.hidden, graph.num_classes, len(settings.num_neighbors)
    )
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    model.train()
    for epoch in range(settings.epochs):
        for batch in epoch_of(epoch):
            # without pyg-lib, PyG does not count per hop: its batches are then not trimmed
            counts = [getattr(batch, f"num_sampled_{of}", None) for of in ("nodes", "edges")]
            out = model(batch.x, batch.edge_index, *counts)[: batch.batch_size]
            loss = functional.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    model.eval()
    with torch.no_grad():
        guess = model(graph.data.x, graph.data.edge_index).argmax(dim=1)
    return 100 * float((guess[graph.test] == graph.data.y[graph.test]).double().mean())


def compare(settings: Settings, graph: Graph, endpoint: str) -> list[tuple[float, float]]:
    """(ours, PyG's) for each seed."""
    results = []
    for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
        ours = NeighborDataset(
            endpoint,
            num_neighbors=settings.num_neighbors,
            batch_size=settings.batch_size,
            seed=seed,
        )

        def from_daemon(epoch: int, ours: NeighborDataset = ours) -> Iterable[Any]:
            ours.set_epoch(epoch)
            return ours

        theirs: Iterable[Any] = NeighborLoader(
            graph.data,
            num_neighbors=list(settings.num_neighbors),
            input_nodes=graph.train,
            batch_size=settings.batch_size,
            shuffle=True,
        )

        def from_memory(_: int, theirs: Iterable[Any] = theirs) -> Iterable[Any]:
            return theirs

        pair = (
            train_and_test(settings, graph, seed, from_daemon),
            train_and_test(settings, graph, seed, from_memory),
        )
        ours.close()
        results.append(pair)
        print(f"seed {seed}: {pair[0]:.2f} ours, {pair[1]:.2f} PyG's", file=sys.stderr, flush=True)
    return results


def summarize(settings: Any, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """The line that is printed; one pair alone has no error."""
    differences = [a - b for a, b in pairs]
    mean, spread = statistics.fmean(differences), {}
    if len(pairs) > 1:
        error, half = statistics.stdev(differences) / len(pairs) ** 0.5, interval(differences)
        ends = [round(mean - half, 3), round(mean + half, 3)]
        spread = {"standard_error": round(error, 3), "interval_95": ends}
    return {
        "date": today(),
        "machine": machine(),
        **asdict(settings),
        "ours": round(statistics.fmean(a for a, _ in pairs), 3),
        "pyg": round(statistics.fmean(b for _, b in pairs), 3),
        "difference": round(mean, 3),
        **spread,
    }


def prepare(settings: Settings, folder: Path) -> Path:
    """The source, with noise where asked for, as a store."""
    source, store = Path(settings.folder), folder / "store"
    if settings.noise:
        noisy = folder / "noisy"
        noisy.mkdir()
        for path in source.glob("*.npy"):
            (noisy / path.name).symlink_to(path.resolve())
        x = np.load(source / "node_feat.npy")
        x = x + settings.noise * x.std() * np.random.default_rng(0).standard_normal(
            x.shape, np.float32
        )
        (noisy / "node_feat.npy").unlink()
        np.save(noisy / "node_feat.npy", x.astype(np.float32))
        source = noisy
    extra = ["--undirected"] if settings.undirected else []
    command("preprocess", "ingest", str(source), str(store), *extra)
    return store


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Compare, print the line and return it."""
    default = Settings("")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a graph in the plain layout")
    parser.add_argument("--undirected", action="store_true")
    for name in ("seeds", "first_seed", "epochs", "batch_size", "hidden"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(default, name))
    for name in ("learning_rate", "noise"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=float, default=getattr(default, name))
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=default.num_neighbors)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as torch chooses")
    parser.add_argument("--out", default="", help="append the line to this file")
    arguments = vars(parser.parse_args(words))
    threads, out = arguments.pop("threads"), arguments.pop("out")
    if threads:
        torch.set_num_threads(threads)
    arguments["num_neighbors"] = tuple(arguments["num_neighbors"])
    settings = Settings(**arguments)
    with tempfile.TemporaryDirectory(prefix="accuracy-") as name:
        store = prepare(settings, Path(name))
        with serving(store, Path(name), "2G") as endpoint:
            line = summarize(settings, compare(settings, load_graph(store), endpoint))
    print(json.dumps(line))
    if out:
        with Path(out).open("a") as f:
            f.write(json.dumps(line) + "\n")
    return line


if __name__ == "__main__":
    main()
