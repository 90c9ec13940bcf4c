"""Loaders of the compared ways: each iteration gives the batches of the next epoch."""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

from blockstore.store import open_store, read_rows
from clients import pyg
from clients.torch import HopDataset, NeighborDataset


class Run(NamedTuple):
    """A run that asks for its batches."""

    options: Any  # cases.Options
    way: Any  # cases.Way
    seed: int
    endpoint: str
    store: Path
    task: Any  # tasks.Task


def nodes(run: Run) -> Iterable[Any]:
    options = run.options
    return NeighborDataset(
        run.endpoint, "train", options.num_neighbors, options.batch_size, seed=run.seed,
        **run.way.options,
    )  # fmt: skip


def _pyg_options(run: Run) -> dict[str, Any]:
    task, options = run.task, run.options
    return {
        "num_neighbors": list(options.num_neighbors), "batch_size": options.batch_size,
        "input_nodes": (task.target, task.train) if task.target else task.train,
        "shuffle": True, "transform": fill_absent,
    }  # fmt: skip


def nodes_as_pyg(run: Run) -> Iterable[Any]:
    """Our loader in PyG's place: the line that changes in a script."""
    return pyg.NeighborLoader(run.endpoint, seed=run.seed, **_pyg_options(run))


def pyg_nodes(run: Run) -> Iterable[Any]:
    """PyG's loader over the graph in memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyg-lib may be missing
        loader: Iterable[Any] = NeighborLoader(run.task.data, **_pyg_options(run))
    return loader


def fill_absent(data: Any) -> Any:
    """Ones as features of types that have none, as PyG's DBLP example does."""
    if isinstance(data, HeteroData):
        for name in data.node_types:
            if "x" not in data[name]:
                data[name].x = torch.ones(data[name].num_nodes, 1)
    return data


def _link_options(run: Run) -> dict[str, Any]:
    return {
        "num_neighbors": list(run.options.num_neighbors), "edge_label_index": run.task.train,
        "neg_sampling_ratio": 1.0, "batch_size": run.options.batch_size, "shuffle": True,
        "replace": run.options.replace,
    }  # fmt: skip


def links(run: Run) -> Iterable[Any]:
    """Our loader of seed edges in PyG's place."""
    return pyg.LinkNeighborLoader(run.endpoint, seed=run.seed, **_link_options(run))


def pyg_links(run: Run) -> Iterable[Any]:
    """PyG's loader over the training edges in memory.

    torch-sparse, which PyG falls back to, draws the last neighbors of a column too rarely; not so
    with `--replace`.
    """
    data = Data(edge_index=run.task.graph, num_nodes=run.task.num_nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyg-lib may be missing
        loader: Iterable[Any] = LinkNeighborLoader(data, **_link_options(run))
    return loader


def hops(run: Run) -> Iterable[Any]:
    return HopDataset(
        run.endpoint, "train", hops=run.options.hops, batch_size=run.options.batch_size,
        seed=run.seed, **run.way.options,
    )  # fmt: skip


class Ordered:
    """Batches from the whole graph, whose seeds come a few partitions at a time.

    Partitions are dealt out as plan `macrobatch` does, with other draws.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._epoch = run, 0
        (node_type,) = (opened := open_store(run.store)).manifest.types
        self._count = node_type.num_partitions
        offsets = opened.side(node_type.partition_offsets_path, np.uint64, self._count + 1)
        ids = read_rows(opened, node_type.store_id).astype(np.int64)
        self._seeds = run.task.train.numpy()
        self._part = np.searchsorted(offsets.astype(np.int64), ids[self._seeds], "right") - 1

    def __iter__(self) -> Iterator[Any]:
        """A session for the seeds of each group of partitions."""
        run, size = self._run, self._run.way.options["macro_partitions"]
        order = np.random.default_rng((run.seed, self._epoch)).permutation(self._count)
        for i, members in enumerate(np.split(order, range(size, self._count, size))):
            seeds = self._seeds[np.isin(self._part, members)]
            number = -(-seeds.size // run.options.batch_size)
            data = NeighborDataset(
                run.endpoint, input_nodes=seeds, num_neighbors=run.options.num_neighbors,
                batch_size=-(-seeds.size // number), plan="minibatch",
                seed=run.seed * 1_000_000 + self._epoch * 1000 + i,
            )  # fmt: skip
            yield from data
            data.close()
        self._epoch += 1
