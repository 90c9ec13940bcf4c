"""Loaders of the compared ways: each iteration gives the batches of the next epoch."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

from clients import pyg
from clients.torch import HopDataset, NeighborDataset
from tools.compare.tasks import CompareOptions, fill_absent


@dataclass(frozen=True)
class Way:
    """One way to train: a loader, its options, and the store that its daemon serves."""

    name: str
    loader: Callable[..., Iterable[Any]]
    against: str  # the name of its baseline, perhaps its own
    ingest: tuple[str, ...] = ()  # options of its store
    options: Mapping[str, Any] = field(default_factory=dict)
    model: tuple[str, ...] = ()  # its name, if the task has several


class TrainingRun(NamedTuple):
    """A run that asks for its batches."""

    options: CompareOptions
    way: Way
    seed: int
    endpoint: str
    task: Any  # tasks.Task


def nodes(run: TrainingRun) -> Iterable[Any]:
    options = run.options
    return NeighborDataset(
        run.endpoint, "train", options.num_neighbors, options.batch_size, seed=run.seed,
        **run.way.options,
    )  # fmt: skip


def _pyg_options(run: TrainingRun) -> dict[str, Any]:
    task, options = run.task, run.options
    return {
        "num_neighbors": list(options.num_neighbors), "batch_size": options.batch_size,
        "input_nodes": (task.target, task.train) if task.target else task.train,
        "shuffle": True, "transform": fill_absent,
    }  # fmt: skip


def nodes_as_pyg(run: TrainingRun) -> Iterable[Any]:
    """Our loader in PyG's place: the line that changes in a script."""
    return pyg.NeighborLoader(run.endpoint, seed=run.seed, **_pyg_options(run))


def pyg_nodes(run: TrainingRun) -> Iterable[Any]:
    """PyG's loader over the graph in memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyg-lib may be missing
        loader: Iterable[Any] = NeighborLoader(run.task.data, **_pyg_options(run))
    return loader


def _link_options(run: TrainingRun) -> dict[str, Any]:
    return {
        "num_neighbors": list(run.options.num_neighbors), "edge_label_index": run.task.train,
        "neg_sampling_ratio": 1.0, "batch_size": run.options.batch_size, "shuffle": True,
        "replace": run.options.replace,
    }  # fmt: skip


def links(run: TrainingRun) -> Iterable[Any]:
    """Our loader of seed edges in PyG's place."""
    return pyg.LinkNeighborLoader(run.endpoint, seed=run.seed, **_link_options(run))


def pyg_links(run: TrainingRun) -> Iterable[Any]:
    """PyG's loader over the training edges in memory.

    torch-sparse, which PyG falls back to, draws the last neighbors of a column too rarely; not so
    with `--replace`.
    """
    data = Data(edge_index=run.task.graph, num_nodes=run.task.num_nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyg-lib may be missing
        loader: Iterable[Any] = LinkNeighborLoader(data, **_link_options(run))
    return loader


def hops(run: TrainingRun) -> Iterable[Any]:
    return HopDataset(
        run.endpoint, "train", hops=run.options.hops, batch_size=run.options.batch_size,
        seed=run.seed, **run.way.options,
    )  # fmt: skip
