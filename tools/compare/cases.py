"""The table of comparisons: which loaders, on which stores, with which task and options."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from tools.command import byte_size
from tools.compare import loaders, tasks


@dataclass(frozen=True, slots=True)
class Options:
    """What is trained.  Each case has defaults of its own."""

    folder: Annotated[Path, "a graph that `blockstore ingest` reads"]
    out: Annotated[Path, "a line for each run; what it holds is not run again"] = Path("runs.jsonl")
    ways: Annotated[tuple[str, ...], "how the names of those to run begin; all if none"] = ()
    seeds: Annotated[int, "runs of each way"] = 10
    first_seed: int = 0
    jobs: Annotated[int, "runs at a time"] = 1
    threads: Annotated[int, "of torch in each run"] = 1
    mem: Annotated[str, byte_size, "of a daemon"] = "512M"
    undirected: Annotated[bool, "add reverse edges at ingest"] = False
    noise: Annotated[float, "added to dense features, in their standard deviations"] = 0.0
    epochs: int = 10
    steps: Annotated[int, "batches of a run, divided among its epochs; 0: whole epochs"] = 0
    num_neighbors: tuple[int, ...] = (15, 10)
    batch_size: int = 500
    hidden: int = 128
    learning_rate: float = 0.003
    dropout: float = 0.5
    weight_decay: float = 0.0
    replace: Annotated[bool, "links: draw neighbors with replacement"] = False
    partitions: Annotated[int, "macro"] = 64
    operator: Annotated[str, "hops: +loops makes a node its own neighbor"] = "sym+loops"
    hops: Annotated[int, "hops: hops 0 to this one"] = 3
    models: Annotated[tuple[str, ...], "hops"] = ("linear", "features", "sgc", "sign", "hoga")
    chunks: Annotated[tuple[int, ...], "hops: rows of a chunk"] = (1, 1000, 8000)
    redeal: Annotated[int, "hops: the largest chunks also redealt every N epochs"] = 0


@dataclass(frozen=True)
class Way:
    """One way to train: a loader, its options, and the store that its daemon serves."""

    name: str
    loader: Callable[..., Iterable[Any]]
    against: str  # the name of its baseline, perhaps its own
    ingest: tuple[str, ...] = ()  # options of its store
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""


class Case(NamedTuple):
    """A comparison: a task, the ways to train on it, and defaults of the options."""

    about: str
    task: Callable[..., tasks.Task]
    ways: Callable[[Options], list[Way]]
    defaults: Mapping[str, Any] = MappingProxyType({})
    source: Callable[[Options, Path], Path] = tasks.noisy_source  # the folder that is ingested
    best: bool = False  # the epoch that is best on valid counts, not the mean of the last fifth


def pair(daemon: Callable[..., Any], pyg: Callable[..., Any]) -> Callable[[Options], list[Way]]:
    """A daemon against PyG's loader over the whole graph in memory."""
    return lambda _: [Way("PyG", pyg, "PyG"), Way("daemon", daemon, "PyG")]


def macro_ways(options: Options) -> list[Way]:
    """In memory, and 1/8 and 1/16 of the partitions at a time, by partitioner, hubs and halos."""
    parts = ("--block-size", "64K", "--partitions", str(options.partitions))
    gap = (*parts, "--hubs", "0.01", "--halo", "0.3")
    wide = (*parts, "--hubs", "0.028")
    plain = {n: (*parts, "--partitioner", n.lower(), "--hubs", "0") for n in ("random", "METIS")}
    base = "in memory"
    found = [Way(base, loaders.nodes, base, gap, {"plan": "minibatch"})]
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
            found.append(Way(f"{name} 1/{share}", loaders.nodes, base, ingest, asked))
    return found


def hop_ways(options: Options) -> list[Way]:
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
            found.append(Way(name, loaders.hops, f"{model}, rows", ingest, asked, model))
    return found


CASES = {
    "accuracy": Case(
        "our GraphSAGE on batches of a daemon and of PyG's NeighborLoader",
        tasks.NodeTask, pair(loaders.nodes, loaders.pyg_nodes), {"epochs": 5, "mem": "2G"},
    ),
    "drop-in": Case(
        "PyG's GraphSAGE, of several types by to_hetero, with the loader's line changed",
        tasks.PygTask, pair(loaders.nodes_as_pyg, loaders.pyg_nodes),
    ),
    "links": Case(
        "AUC in points of PyG's unsupervised GraphSAGE; the folder has train_edge.npy, "
        "test_edge.npy",
        tasks.LinkTask, pair(loaders.links, loaders.pyg_links),
        {"seeds": 5, "epochs": 25, "steps": 400, "num_neighbors": (10, 5), "batch_size": 1024,
         "hidden": 32, "learning_rate": 0.01},
        tasks.train_edges,
    ),
    "macro": Case(
        "macro-batches against batches from the whole graph, by partitioner, hubs and halos",
        tasks.NodeTask, macro_ways, {"epochs": 60, "batch_size": 250, "jobs": 2},
    ),
    "hops": Case(
        "models on propagated features: chunks of rows against rows in any order",
        tasks.HopTask, hop_ways,
        {"epochs": 40, "batch_size": 8000, "learning_rate": 0.01, "dropout": 0.3, "mem": "768M",
         "jobs": 2},
        best=True,
    ),
}  # fmt: skip
