"""AUC against PyG's LinkNeighborLoader: `python -m tools.link_accuracy FOLDER --out FILE`.

PyG's example of unsupervised GraphSAGE: an encoder, a dot product, binary cross-entropy over the
training edges and as many random pairs.  Each pair begins with the same parameters; one run takes
batches from the daemon, the other from PyG's loader over the graph in memory, which is all that
differs.  (torch-sparse, which PyG falls back to, draws the last neighbors of a column too rarely;
not so with `--replace`.)  Nodes have an embedding each.  Tested full-batch, the mean of five times
in the last fifth of the steps: test edges against the same sources with random nodes that are
targets somewhere.  The folder is in the plain layout, with edges and lists of edges
`train_edge.npy` and `test_edge.npy`; what FILE has is not run again.
"""

import argparse
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.utils import to_undirected
from torchmetrics.functional.classification import binary_auroc

from clients import pyg
from clients.models import GraphSage
from preprocess.errors import BadInput
from tools.bench.setup import command, serving
from tools.pairs import finish

WAYS = ("daemon", "PyG")
TESTS = 5  # in the last fifth of the steps


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison."""

    folder: str
    seeds: int = 5
    first_seed: int = 0
    steps: int = 400
    num_neighbors: tuple[int, ...] = (10, 5)
    batch_size: int = 1024
    hidden: int = 32
    learning_rate: float = 0.01
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """Edges in memory, original ids."""

    num_nodes: int
    graph: Tensor  # (2, edges): the training edges in both directions
    train: Tensor  # (2, edges)
    test: Tensor
    targets: Tensor  # nodes that are the target of some edge


def load_task(folder: Path) -> Task:
    """What the folder holds.  Raises BadInput: a file is not there."""
    for name in ("edge_index", "train_edge", "test_edge"):
        if not (path := folder / f"{name}.npy").is_file():
            raise BadInput.at(
                str(path), "no such file", "edges, and lists of those to train and to test on",
                "take a graph with splits of its edges, such as gowalla-bipartite",
            )  # fmt: skip
    edges = torch.from_numpy(np.load(folder / "edge_index.npy").astype(np.int64))
    lists = [np.load(folder / f"{name}_edge.npy").astype(np.int64) for name in ("train", "test")]
    train, test = (edges[:, torch.from_numpy(chosen)] for chosen in lists)
    num_nodes = int(edges.max()) + 1
    return Task(num_nodes, to_undirected(train), train, test, torch.unique(edges[1]))


class Encoder(torch.nn.Module):
    """GraphSAGE over an embedding of each node."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(task.num_nodes, settings.hidden)
        self.sage = GraphSage(
            settings.hidden, settings.hidden, settings.hidden, len(settings.num_neighbors)
        )

    def forward(self, n_id: Tensor, edge_index: Tensor) -> Tensor:
        """(nodes, hidden)."""
        out: Tensor = self.sage(self.embedding(n_id), edge_index)
        return out


def train(settings: Settings, task: Task, seed: int, batches: Iterator[Any]) -> float:
    """AUC of what `steps` batches make of the encoder, in points: the mean of the last fifth."""
    torch.manual_seed(seed)
    model = Encoder(task, settings)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    tests = np.linspace(0.8 * settings.steps, settings.steps, TESTS).round().tolist()
    found = []
    for step, batch in enumerate(islice(batches, settings.steps), 1):
        out = model(batch.n_id, batch.edge_index)
        source, target = batch.edge_label_index
        score = (out[source] * out[target]).sum(dim=-1)
        loss = functional.binary_cross_entropy_with_logits(score, batch.edge_label)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step in tests:
            found.append(auc(task, model))
    return float(np.mean(found))


def auc(task: Task, model: Encoder) -> float:
    """Of test edges against the same sources with random targets, in points."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        out = model(torch.arange(task.num_nodes), task.graph)
        source, target = task.test
        picks = torch.randint(task.targets.numel(), target.shape, generator=rng)
        pairs = [(source, target), (source, task.targets[picks])]
        scores = torch.cat([(out[a] * out[b]).sum(dim=-1) for a, b in pairs])
        truth = torch.cat([torch.ones_like(target), torch.zeros_like(target)])
        return 100 * float(binary_auroc(scores, truth))


def epochs(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def runs(
    settings: Settings, task: Task, endpoint: str, done: set[tuple[str, int]]
) -> Iterable[dict[str, Any]]:
    """A line for each way and seed that is not done."""
    for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
        for way in WAYS:
            if (way, seed) in done:
                continue
            loader_of: Any
            loader_of, source = (
                (pyg.LinkNeighborLoader, endpoint)
                if way == "daemon"
                else (LinkNeighborLoader, Data(edge_index=task.graph, num_nodes=task.num_nodes))
            )
            own: dict[str, Any] = {"seed": seed} if way == "daemon" else {}
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of pyg-lib, which may be missing
                loader = loader_of(  # the one line
                    source, list(settings.num_neighbors), edge_label_index=task.train,
                    neg_sampling_ratio=1.0, batch_size=settings.batch_size, shuffle=True,
                    replace=settings.replace, **own,
                )  # fmt: skip
            found = train(settings, task, seed, epochs(loader))
            yield {"way": way, "seed": seed, "accuracy": found, "steps": len(loader)}


def main(words: list[str] | None = None) -> str:
    """Do what is left of the runs; returns the table of all."""
    default = Settings("")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="with edge_index.npy, train_edge.npy and test_edge.npy")
    for name, meaning in (
        ("seeds", "pairs of runs"), ("first_seed", "of the first pair"),
        ("steps", "batches of a run"), ("batch_size", "edges, and as many random pairs"),
        ("hidden", "width"),
    ):  # fmt: skip
        option, value = "--" + name.replace("_", "-"), getattr(default, name)
        parser.add_argument(option, type=int, default=value, help=f"{meaning}: {value}")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=default.num_neighbors)
    parser.add_argument("--replace", action="store_true", help="draw with replacement")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", required=True, help="a line for each run")
    arguments = vars(parser.parse_args(words))
    torch.set_num_threads(arguments.pop("threads"))
    out = Path(arguments.pop("out"))
    arguments["num_neighbors"] = tuple(arguments["num_neighbors"])
    settings = Settings(**arguments)
    try:
        task = load_task(Path(settings.folder))
    except BadInput as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="links-") as name:
        folder = Path(name)
        (folder / "graph").mkdir()
        np.save(folder / "graph" / "edge_index.npy", task.train.numpy())
        store = folder / "store"
        command("preprocess", "ingest", str(folder / "graph"), str(store), "--undirected")
        with serving(store, folder, "512M") as endpoint:
            return finish(out, settings, lambda done: runs(settings, task, endpoint, done), WAYS[1])


if __name__ == "__main__":
    main()
