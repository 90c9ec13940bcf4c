"""The table of comparisons: which loaders, on which stores, with which task and options."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tools.compare import loaders, tasks
from tools.compare.loaders import Way
from tools.compare.tasks import CompareOptions


class Case(NamedTuple):
    """A comparison: a task, the ways to train on it, and defaults of the options."""

    about: str
    task: Callable[..., tasks.Task]
    ways: Callable[[CompareOptions], list[Way]]
    defaults: Mapping[str, Any] = MappingProxyType({})
    source: Callable[[CompareOptions, Path], Path] = (
        tasks.noisy_source
    )  # the folder that is ingested
    best: bool = False  # the epoch that is best on valid counts, not the mean of the last fifth


def pair(
    daemon: Callable[..., Any], pyg: Callable[..., Any]
) -> Callable[[CompareOptions], list[Way]]:
    """A daemon against PyG's loader over the whole graph in memory."""
    return lambda _: [Way("PyG", pyg, "PyG"), Way("daemon", daemon, "PyG")]


def macro_ways(options: CompareOptions) -> list[Way]:
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
            found.append(Way(name, loaders.hops, f"{model}, rows", ingest, asked, (model,)))
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
        lambda options, _: tasks.LinkTask(options), pair(loaders.links, loaders.pyg_links),
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
