"""Seeds per second of whole loaders: ours, and PyG's NeighborLoader over tensors in memory.

The first tenth of an epoch, in which pipelines fill, is not timed.
"""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from tools.bench.epochs import MOST, ServedEpochs, open_epochs, take
from tools.bench.harness import BenchPlan, GraphOptions, Run, Side, SideSkipped
from tools.bench.setup import drop_cache


@dataclass(frozen=True)
class Options(GraphOptions):
    """An epoch over the same seeds."""

    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    seeds: Annotated[int, "of our epoch"] = 100_000
    peer_seeds: Annotated[int, "of the epoch of PyG's loader"] = 40_000
    workers: Annotated[tuple[int, ...], "of the daemon; 0: its own choice"] = (0,)
    pyg_workers: tuple[int, ...] = (0, 2, 4)
    mem: str = "4G"
    cold: Annotated[bool, "empty the page cache before each round"] = False
    rounds: int = 5

    def tenth(self, seeds: int) -> int:
        return max(1, seeds // self.batch_size // 10)


def seeds_of(graph: Path, count: int) -> NDArray[np.int64]:
    """Original ids of training nodes.  Raises ValueError: there are fewer."""
    found: NDArray[np.int64] = np.load(graph / "train_idx.npy")[:count]
    if found.size < count:
        raise ValueError(f"the graph has {found.size} training nodes, {count} are asked for")
    return found


def pyg_sampler() -> str:
    """What PyG samples with here: pyg-lib is the faster one."""
    found = (name for name in ("pyg_lib", "torch_sparse") if importlib.util.find_spec(name))
    return next(found, "none")


@contextmanager
def open_pyg(given: Options, workers: int) -> Iterator[Run]:
    """Its sampler turns the edges to CSC beforehand."""
    if pyg_sampler() == "none":
        raise SideSkipped("PyG samples with pyg-lib or torch-sparse, and neither is installed")
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    graph = given.graph()
    arrays = {
        name: torch.from_numpy(np.load(graph / f"{file}.npy"))
        for name, file in (("x", "node_feat"), ("y", "node_label"), ("edge_index", "edge_index"))
    }
    loader = NeighborLoader(
        Data(**arrays), num_neighbors=list(given.fanouts), batch_size=given.batch_size,
        input_nodes=torch.from_numpy(seeds_of(graph, given.peer_seeds)), shuffle=True,
        num_workers=workers, persistent_workers=workers > 0, filter_per_worker=True,
    )  # fmt: skip
    yield lambda: take(loader, given.tenth(given.peer_seeds), MOST)


def plans(given: Options) -> Iterator[BenchPlan]:
    """Both loaders, by numbers of workers."""
    graph = given.graph()
    options = {
        "num_neighbors": given.fanouts, "batch_size": given.batch_size,
        "input_nodes": seeds_of(graph, given.seeds),
    }  # fmt: skip
    ours = ServedEpochs(given.store(), given.mem, options, before=given.tenth(given.seeds))
    sides = [
        Side(f"ours, {w} workers", open_epochs, (ours._replace(serve=("--workers", w)),))
        for w in map(str, given.workers)
    ]
    sides += [Side(f"PyG, {w} workers", open_pyg, (given, w)) for w in given.pyg_workers]
    setting = {"cache": "cold" if given.cold else "warm", "pyg_sampler": pyg_sampler()}
    forget = functools.partial(drop_cache, graph, ours.store)
    yield BenchPlan(sides, setting, before=forget if given.cold else None)
