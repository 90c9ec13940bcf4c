"""PyG's own training loops with one line changed, in pairs: `python -m tools.drop_in FOLDER`.

A pair trains PyG's model from the same initialisation twice: on the batches of PyG's own
`NeighborLoader` over the graph in memory, and on those of `clients.pyg.NeighborLoader`, which is
the only difference.  Of a graph of one type the model is `torch_geometric.nn.GraphSAGE`, of several
the same through `to_hetero`.  Both are evaluated on the whole graph, on the test split.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE, to_hetero

from blockstore.store import Store, open_store, read_rows
from clients import pyg as ours
from preprocess.errors import BadInput
from preprocess.export.edges import columns_of
from tools.accuracy import summarize
from tools.bench.setup import command, serving


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison."""

    folder: str
    undirected: bool = False
    seeds: int = 10
    first_seed: int = 0
    epochs: int = 10
    num_neighbors: tuple[int, ...] = (15, 10)
    batch_size: int = 500
    hidden: int = 128
    learning_rate: float = 0.003


@dataclass(frozen=True, slots=True)
class Task:
    """A whole graph in PyG's records, and whose labels are learned."""

    data: Any  # Data or HeteroData
    target: str  # node type; "" where there is one
    train: Tensor
    test: Tensor
    num_classes: int


def load_task(store: Store) -> Task:
    """What the store holds, original ids, so that both loaders give the very same graph.

    Raises BadInput: no type has labels and both splits.
    """
    manifest = store.manifest
    several = len(manifest.types) > 1
    data: Any = HeteroData() if several else Data()
    original: list[Any] = []
    fit = [t for t in manifest.types if t.label is not None and {"train", "test"} <= {*t.splits}]
    if not fit:
        raise BadInput.at(
            str(store.path), "no node type with labels and splits", "labels, 'train' and 'test'",
            "take a graph that has them; for links there is tools.link_accuracy",
        )  # fmt: skip
    target = fit[0]
    for t in manifest.types:
        original.append(read_rows(store, t.original_id).astype(np.int64))
        inverse = read_rows(store, t.store_id).astype(np.int64) - t.first
        nodes = data[t.name] if several else data
        nodes.num_nodes = t.num_nodes
        if t.features:
            x = read_rows(store, next(iter(t.features.values())))[inverse]
            nodes.x = torch.from_numpy(x.astype(np.float32))
        if t.label is not None:
            nodes.y = torch.from_numpy(read_rows(store, t.label)[inverse].astype(np.int64))
    ids = np.concatenate(original)
    for relation in manifest.relations:
        edges = [np.stack([ids[s], ids[d]]) for d, s, _ in columns_of(store, relation)]
        at = data[relation.src, relation.name, relation.dst] if several else data
        at.edge_index = torch.from_numpy(np.concatenate(edges, axis=1))
    splits = {k: torch.from_numpy(read_rows(store, a)) for k, a in target.splits.items()}
    labels = (data[target.name] if several else data).y
    return Task(
        data, target.name if several else "", splits["train"], splits["test"],
        int(labels.max()) + 1,
    )  # fmt: skip


def fill_absent(data: Any) -> Any:
    """Ones as features of types that have none, as PyG's DBLP example does."""
    if isinstance(data, HeteroData):
        for name in data.node_types:
            if "x" not in data[name]:
                data[name].x = torch.ones(data[name].num_nodes, 1)
    return data


class Model:
    """PyG's GraphSAGE, for one type or several."""

    def __init__(self, settings: Settings, task: Task) -> None:
        model: Any = GraphSAGE(
            (-1, -1), settings.hidden, len(settings.num_neighbors), task.num_classes, dropout=0.5
        )
        self._target = task.target
        self.net: Any = to_hetero(model, task.data.metadata()) if task.target else model
        with torch.no_grad():  # widths that it finds out by itself
            self.net.eval()
            self(task.data)

    def __call__(self, data: Any) -> Tensor:
        """Logits of the nodes whose labels are learned."""
        logits: Tensor
        if self._target:
            logits = self.net(data.x_dict, data.edge_index_dict)[self._target]
        else:
            logits = self.net(data.x, data.edge_index)
        return logits


def train_and_test(settings: Settings, task: Task, seed: int, loader: Iterable[Any]) -> float:
    """Test accuracy in points after training on the loader's batches."""
    torch.manual_seed(seed)
    model = Model(settings, task)
    optimizer = torch.optim.Adam(model.net.parameters(), settings.learning_rate)
    model.net.train()
    for _ in range(settings.epochs):
        for batch in loader:
            nodes = batch[task.target] if task.target else batch
            size = nodes.batch_size
            loss = functional.cross_entropy(model(batch)[:size], nodes.y[:size])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    model.net.eval()
    with torch.no_grad():
        guess = model(task.data).argmax(dim=1)
    labels = (task.data[task.target] if task.target else task.data).y
    return 100 * float((guess[task.test] == labels[task.test]).double().mean())


def compare(settings: Settings, task: Task, endpoint: str) -> list[tuple[float, float]]:
    """(ours, PyG's) for each seed."""
    nodes: Any = (task.target, task.train) if task.target else task.train
    options: dict[str, Any] = {
        "num_neighbors": list(settings.num_neighbors), "input_nodes": nodes,
        "batch_size": settings.batch_size, "shuffle": True, "transform": fill_absent,
    }  # fmt: skip
    results = []
    for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
        mine = ours.NeighborLoader(endpoint, seed=seed, **options)  # the line that changes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pyg-lib, which may be missing
            theirs = NeighborLoader(task.data, **options)
        pair = (
            train_and_test(settings, task, seed, mine),
            train_and_test(settings, task, seed, theirs),
        )
        mine.dataset.close()
        results.append(pair)
        print(f"seed {seed}: {pair[0]:.2f} ours, {pair[1]:.2f} PyG's", file=sys.stderr, flush=True)
    return results


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Compare, print the line and return it."""
    default = Settings("")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a graph that `blockstore ingest` knows")
    parser.add_argument("--undirected", action="store_true", help="add reverse edges at ingest")
    for name, meaning in (
        ("seeds", "pairs of runs"), ("first_seed", "of the first pair"), ("epochs", "of a run"),
        ("batch_size", "seed nodes"), ("hidden", "width"),
    ):  # fmt: skip
        option, value = "--" + name.replace("_", "-"), getattr(default, name)
        parser.add_argument(option, type=int, default=value, help=f"{meaning}: {value}")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=default.num_neighbors)
    parser.add_argument("--out", default="", help="append the line to this file")
    arguments = vars(parser.parse_args(words))
    out = arguments.pop("out")
    arguments["num_neighbors"] = tuple(arguments["num_neighbors"])
    settings = Settings(**arguments)
    with tempfile.TemporaryDirectory(prefix="drop-in-") as name:
        store = Path(name) / "store"
        extra = ["--undirected"] if settings.undirected else []
        command("preprocess", "ingest", settings.folder, str(store), *extra)
        try:
            task = load_task(open_store(store))
        except BadInput as error:
            parser.error(str(error))
        fill_absent(task.data)
        with serving(store, Path(name), "512M") as endpoint:
            line = summarize(settings, compare(settings, task, endpoint))
    print(json.dumps(line))
    if out:
        with Path(out).open("a") as f:
            f.write(json.dumps(line) + "\n")
    return line


if __name__ == "__main__":
    main()
