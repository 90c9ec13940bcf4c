"""Training tasks: a graph in memory, a model, the loss of a batch, a test on the whole graph.

Each task is made once per process, from the options and a daemon with its store.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero
from torch_geometric.utils import to_undirected
from torchmetrics.functional.classification import binary_auroc

from blockstore.owners import list_owners
from blockstore.store import open_store, read_rows
from clients.hopwise.dataset import HopDataset
from clients.hopwise.models import ALONE, make_model
from clients.large.batch import PLACE
from clients.large.history import HistoricalEmbeddings
from clients.models import GraphSage
from clients.torch import Batch
from preprocess.errors import BadInput
from preprocess.files.store import stored_blocks
from tools.bench.setup import command
from tools.command import byte_size


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of all cases, each of which has its own defaults."""

    folder: Annotated[Path, "a graph that `blockstore ingest` reads"]
    out: Annotated[Path, "a line for each run; what it holds is not run again"] = Path("runs.jsonl")
    ways: Annotated[tuple[str, ...], "how the names of those to run begin; all if none"] = ()
    seeds: Annotated[int, "runs of each way"] = 10
    first_seed: int = 0
    jobs: Annotated[int, "runs at a time"] = 1
    threads: Annotated[int, "of torch in each run"] = 1
    mem: Annotated[str, byte_size, "of a daemon"] = "512M"
    undirected: Annotated[bool, "add reverse edges at ingest"] = False
    width: Annotated[int, "leading singular vectors of the features to keep; 0: all of them"] = 0
    noise: Annotated[float, "added to dense features, in their standard deviations"] = 0.0
    epochs: int = 10
    steps: Annotated[int, "batches of a run, divided among its epochs; 0: whole epochs"] = 0
    num_neighbors: tuple[int, ...] = (15, 10)
    batch_size: int = 500
    hidden: int = 128
    learning_rate: float = 0.003
    cosine: Annotated[bool, "have the learning rate fall to 0 over the epochs"] = False
    dropout: float = 0.5
    weight_decay: float = 0.0
    replace: Annotated[bool, "links: draw neighbors with replacement"] = False
    partitions: Annotated[int, "macro, large"] = 64
    operator: Annotated[str, "hops: +loops makes a node its own neighbor"] = "sym+loops"
    hops: Annotated[int, "hops: hops 0 to this one"] = 3
    models: Annotated[tuple[str, ...], "hops"] = ("linear", "features", "sgc", "sign", "hoga")
    chunks: Annotated[tuple[int, ...], "hops: rows of a chunk"] = (1, 1000, 8000)
    redeal: Annotated[int, "hops: the largest chunks also redealt every N epochs"] = 0


class ServedStore(NamedTuple):
    """A daemon, and the store that it serves."""

    endpoint: str
    store: Path


class TrainingTask(Protocol):
    """A model to train, its loss and its test."""

    @property
    def model(self) -> Callable[..., nn.Module]:
        """A function that makes a new model by torch's seed; takes a name if there are several."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch."""

    def test(self, model: nn.Module) -> tuple[float, float]:
        """(score on valid, score on test), in points."""


def fill_absent(data: Any) -> Any:
    """Set ones as features of types that have none, as in PyG's DBLP example."""
    if isinstance(data, HeteroData):
        for name in data.node_types:
            if "x" not in data[name]:
                data[name].x = torch.ones(data[name].num_nodes, 1)
    return data


def changed_source(options: CompareOptions, work: Path) -> Path:
    """The folder, or one of links to it with narrower features, Gaussian noise in them, or both."""
    if not options.noise and not options.width:
        return Path(options.folder)
    (made := work / "changed").mkdir()
    for path in options.folder.resolve().iterdir():
        if not path.name.startswith("node_feat"):
            (made / path.name).symlink_to(path)
    x = _narrowed(options.folder, options.width)
    draws = np.random.default_rng(0).standard_normal(x.shape, np.float32)
    np.save(made / "node_feat.npy", (x + options.noise * x.std() * draws).astype(np.float32))
    return made


def _narrowed(folder: Path, width: int) -> NDArray[np.float32]:
    """Project features, dense or CSR, on leading singular vectors, with standard deviation 1.

    width  number of vectors; 0: return the features unchanged, dense
    """
    x: Any
    if (dense := folder / "node_feat.npy").is_file():
        x = np.load(dense)
    else:
        shape = json.loads((folder / "node_feat_csr.json").read_text())["shape"]
        parts = (np.load(folder / f"node_feat_{n}.npy") for n in ("data", "indices", "indptr"))
        x = csr_array(tuple(parts), shape)
    if not width:
        whole: NDArray[np.float32] = x.toarray() if isinstance(x, csr_array) else x
        return whole
    x = x.astype(np.float64)
    _, _, vectors = svds(x, width, random_state=0)
    found = x @ vectors.T
    narrow: NDArray[np.float32] = (found / found.std()).astype(np.float32)
    return narrow


def train_edges(options: CompareOptions, work: Path) -> Path:
    """Make a folder of the training edges in both directions.  Raises BadInput: no such file."""
    for name in ("edge_index", "train_edge", "test_edge"):
        if not (path := options.folder / f"{name}.npy").is_file():
            raise BadInput.at(
                str(path), "no such file", "edges, and lists of those to train and to test on",
                "take a graph with splits of its edges, such as gowalla-bipartite",
            )  # fmt: skip
    (work / "edges").mkdir()
    edges, chosen = (np.load(options.folder / f"{n}.npy") for n in ("edge_index", "train_edge"))
    both = to_undirected(torch.from_numpy(edges[:, chosen].astype(np.int64)))
    np.save(work / "edges" / "edge_index.npy", both.numpy())
    return work / "edges"


class NodeTask:
    """Node classification with our GraphSAGE; the store's graph as PyG data, by original ids."""

    def __init__(self, options: CompareOptions, served: ServedStore) -> None:
        """Raises BadInput: no type has labels and both splits."""
        self._options, self._depth = options, len(options.num_neighbors)
        store = open_store(served.store)
        types = store.manifest.types
        fit = [t for t in types if t.label is not None and {"train", "test"} <= {*t.splits}]
        if not fit:
            raise BadInput.at(
                str(options.folder), "no node type with labels and splits",
                "labels, 'train' and 'test'", "for links take case 'links'",
            )  # fmt: skip
        several = len(types) > 1
        self.data: Any = HeteroData() if several else Data()
        self.target = fit[0].name if several else ""  # type whose labels are learned
        original = []
        for t in types:
            original.append(read_rows(store, t.original_id).astype(np.int64))
            inverse = read_rows(store, t.store_id).astype(np.int64) - t.first
            held = self.data[t.name] if several else self.data
            held.num_nodes, held.n_id = t.num_nodes, torch.arange(t.num_nodes)
            if t.features:
                x = read_rows(store, next(iter(t.features.values())))[inverse]
                held.x = torch.from_numpy(x.astype(np.float32))
            if t.label is not None:
                held.y = torch.from_numpy(read_rows(store, t.label)[inverse].astype(np.int64))
        ids = np.concatenate(original)
        for r in store.manifest.relations:
            edges = [np.stack([ids[b.sources], ids[d]]) for d, b in stored_blocks(store, r)]
            at = self.data[r.src, r.name, r.dst] if several else self.data
            at.edge_index = torch.from_numpy(np.concatenate(edges, axis=1))
        self.train, self._test = (
            torch.from_numpy(read_rows(store, fit[0].splits[name])) for name in ("train", "test")
        )
        self._classes = int(self._of(self.data).y.max()) + 1

    def _of(self, data: Any) -> Any:
        """The target type's part of a graph or batch."""
        return data[self.target] if self.target else data

    def model(self) -> nn.Module:
        given = self._options
        width = self.data.x.size(1)
        return GraphSage(width, given.hidden, self._classes, self._depth, given.dropout)

    def logits(self, model: nn.Module, data: Any) -> Tensor:
        """Logits of a batch or of the whole graph."""
        # without pyg-lib, PyG does not count per hop: its batches are then not trimmed
        counts = [getattr(data, f"num_sampled_{of}", None) for of in ("nodes", "edges")]
        out: Tensor = model(data.x, data.edge_index, *counts, getattr(data, "frontier", "new"))
        return out

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        nodes = self._of(batch)
        size = nodes.batch_size
        return functional.cross_entropy(self.logits(model, batch)[:size], nodes.y[:size])

    def test(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy on test over the whole graph; valid is not evaluated."""
        right = self.logits(model, self.data).argmax(dim=1) == self._of(self.data).y
        return 0.0, 100 * float(right[self._test].double().mean())


HOME_RANKS, HOME_OWNERS = 4, "four"


class HomeTask(NodeTask):
    """As `NodeTask`, by several ranks: a step's loss is the mean over the seeds of all ranks."""

    def __init__(self, options: CompareOptions, served: ServedStore) -> None:
        super().__init__(options, served)
        if HOME_OWNERS not in list_owners(open_store(served.store)):
            words = ["--name", HOME_OWNERS, "--owners", str(HOME_RANKS)]
            command("preprocess", "owners", str(served.store), *words)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss over the batches of all ranks; one without seeds adds nothing."""
        some = [each for each in batch if each.batch_size]
        size = sum(each.batch_size for each in some)
        parts = [
            super(HomeTask, self).loss(model, each) * (each.batch_size / size) for each in some
        ]
        return torch.stack(parts).sum()


class HistoryStep(NamedTuple):
    """A step of a large batch of partitions, with the historical embeddings of its model."""

    batch: Batch
    history: HistoricalEmbeddings


class LargeTask(NodeTask):
    """As `NodeTask`, also with historical embeddings."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, HistoryStep):
            return super().loss(model, batch)
        step, history = batch
        activations = partial(history, places=step.features[PLACE])
        counts = (step.num_sampled_nodes, step.num_sampled_edges)
        out = model(step.x, step.edge_index, *counts, step.frontier, None, None, activations)
        assert step.y is not None
        return functional.cross_entropy(out, step.y[: step.batch_size])


class PygTask(NodeTask):
    """As `NodeTask`, with PyG's GraphSAGE, by `to_hetero` if there are several types."""

    def __init__(self, options: CompareOptions, served: ServedStore) -> None:
        super().__init__(options, served)
        fill_absent(self.data)

    def model(self) -> nn.Module:
        """A model whose input widths are set by a first pass."""
        given = self._options
        made: Any = GraphSAGE(
            (-1, -1), given.hidden, self._depth, self._classes, dropout=given.dropout
        )
        if self.target:
            made = to_hetero(made, self.data.metadata())
        with torch.no_grad():
            self.logits(made.eval(), self.data)
        found: nn.Module = made
        return found

    def logits(self, model: nn.Module, data: Any) -> Tensor:
        out: Tensor
        if self.target:
            out = model(data.x_dict, data.edge_index_dict)[self.target]
        else:
            out = model(data.x, data.edge_index)
        return out


class Encoder(nn.Module):
    """GraphSAGE over an embedding of each node."""

    def __init__(self, num_nodes: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_nodes, width)
        self.sage = GraphSage(width, width, width, depth, dropout)

    def forward(self, n_id: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.sage(self.embedding(n_id), edge_index)
        return out


class LinkTask:
    """Link prediction: GraphSAGE, dot products, binary cross-entropy, random negative pairs."""

    def __init__(self, options: CompareOptions) -> None:
        edges = torch.from_numpy(np.load(options.folder / "edge_index.npy").astype(np.int64))
        lists = [np.load(options.folder / f"{name}_edge.npy") for name in ("train", "test")]
        self.train, self._test = (edges[:, torch.from_numpy(c.astype(np.int64))] for c in lists)
        self.num_nodes, self._targets = int(edges.max()) + 1, torch.unique(edges[1])
        self.graph, self._options = to_undirected(self.train), options

    def model(self) -> nn.Module:
        given = self._options
        return Encoder(self.num_nodes, given.hidden, len(given.num_neighbors), given.dropout)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of seed edges and as many random pairs."""
        out = model(batch.n_id, batch.edge_index)
        source, target = batch.edge_label_index
        score = (out[source] * out[target]).sum(dim=-1)
        return functional.binary_cross_entropy_with_logits(score, batch.edge_label)

    def test(self, model: nn.Module) -> tuple[float, float]:
        """AUC of test edges against the same sources with random nodes that are targets."""
        out = model(torch.arange(self.num_nodes), self.graph)
        source, target = self._test
        draws = torch.Generator().manual_seed(0)
        picks = torch.randint(self._targets.numel(), target.shape, generator=draws)
        pairs = [(source, target), (source, self._targets[picks])]
        scores = torch.cat([(out[a] * out[b]).sum(dim=-1) for a, b in pairs])
        truth = torch.cat([torch.ones_like(target), torch.zeros_like(target)])
        return 0.0, 100 * float(binary_auroc(scores, truth))


class HopTask:
    """Node classification by models on propagated features."""

    def __init__(self, options: CompareOptions, served: ServedStore) -> None:
        self._options = options
        self._held = [self._split(served.endpoint, name) for name in ("valid", "test")]
        self._classes = 1 + max(int(y.max()) for _, y in self._held)

    def _split(self, endpoint: str, split: str) -> tuple[list[Tensor], Tensor]:
        """All rows of a split: tensors by hop, and labels."""
        data = HopDataset(endpoint, split, hops=self._options.hops, shuffle=False)
        batches = list(data)
        data.close()
        x = [torch.cat([b.x[i] for b in batches]) for i in range(self._options.hops + 1)]
        return x, torch.cat([b.y for b in batches if b.y is not None])

    def model(self, name: str) -> nn.Module:
        """A model by name; some take only hop 0."""
        given, x = self._options, self._held[0][0]
        self._own = 1 if name in ALONE else len(x)
        width = x[0].size(1)
        return make_model(name, width, len(x), self._classes, given.hidden, given.dropout)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch.x[: self._own]), batch.y)

    def test(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy on valid and on test."""
        valid, test = (
            100 * float((model(x[: self._own]).argmax(dim=1) == y).double().mean())
            for x, y in self._held
        )
        return valid, test
