"""Seeds per second of whole loaders: ours, PyG's NeighborLoader, workers over mapped files."""

import contextlib
import functools
import importlib.metadata
import itertools
import mmap
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from clients.torch import NeighborDataset
from tools.bench.harness import GraphOptions, Plan, Run, Side, Skipped
from tools.bench.setup import drop_cache, make_csc, serving


@dataclass(frozen=True)
class Options(GraphOptions):
    """An epoch over the same seeds."""

    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    seeds: Annotated[int, "of our epoch"] = 100_000
    peer_seeds: Annotated[int, "of the epoch of another loader"] = 40_000
    workers: Annotated[tuple[int, ...], "of the daemon; 0: its own choice"] = (0,)
    pyg_workers: tuple[int, ...] = (0, 2, 4)
    mapped_workers: tuple[int, ...] = (4,)
    mem: str = "4G"
    cold: Annotated[bool, "empty the page cache before each round"] = False
    rounds: int = 5


def seeds_of(graph: Path, count: int) -> NDArray[np.int64]:
    """Original ids of training nodes.  Raises Skipped: there are fewer."""
    found: NDArray[np.int64] = np.load(graph / "train_idx.npy")[:count]
    if found.size < count:
        raise Skipped(f"the graph has {found.size} training nodes, {count} are asked for")
    return found


def drain(loader: Iterable[Any], num_batches: int) -> Mapping[str, float]:
    """An epoch to its end; the first tenth of it, in which pipelines fill, is not timed."""
    skipped = max(1, num_batches // 10)
    batches = iter(loader)
    for batch in itertools.islice(batches, skipped):
        assert batch.x.size(0) >= batch.batch_size
    begun = time.perf_counter()
    seeds = sum(int(batch.batch_size) for batch in batches)
    return {"seeds_per_s": seeds / (time.perf_counter() - begun)}


@contextlib.contextmanager
def open_ours(given: Options, workers: int) -> Iterator[Run]:
    options = ("--workers", str(workers))
    with serving(given.store(), given.folder, given.mem, *options) as endpoint:
        data = NeighborDataset(
            endpoint, num_neighbors=given.fanouts, batch_size=given.batch_size,
            input_nodes=seeds_of(given.graph(), given.seeds),
        )  # fmt: skip
        yield lambda: drain(data, len(data))
        data.close()


@contextlib.contextmanager
def open_pyg(given: Options, workers: int, filter_in_workers: bool) -> Iterator[Run]:
    """PyG's loader over tensors in memory; its sampler turns the edges to CSC beforehand."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
    except ImportError as error:
        raise Skipped(f"torch_geometric cannot be imported: {error}") from error
    if pyg_sampler() == "none":
        raise Skipped("PyG samples with pyg-lib or torch-sparse, and neither is installed")
    graph = given.graph()
    arrays = {
        name: torch.from_numpy(np.load(graph / f"{file}.npy"))
        for name, file in (("x", "node_feat"), ("y", "node_label"), ("edge_index", "edge_index"))
    }
    loader = NeighborLoader(
        Data(**arrays),
        num_neighbors=list(given.fanouts),
        input_nodes=torch.from_numpy(seeds_of(graph, given.peer_seeds)),
        batch_size=given.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        filter_per_worker=filter_in_workers,
    )
    yield lambda: drain(loader, len(loader))


class MappedBatch(NamedTuple):
    """What a batch is for training."""

    x: Tensor
    y: Tensor
    edge_index: Tensor
    n_id: Tensor
    batch_size: int


class MappedSampler:
    """Collates seeds to batches over mapped files, without readahead: PyG's sampler, plain rows."""

    def __init__(self, graph: Path, csc: Path, fanouts: tuple[int, ...]) -> None:
        self._files = {
            "indptr": csc / "indptr.npy",
            "indices": csc / "indices.npy",
            "x": graph / "node_feat.npy",
            "y": graph / "node_label.npy",
        }
        self._fanouts = list(fanouts)
        self._arrays: dict[str, Tensor] = {}

    def __call__(self, seeds: list[int]) -> MappedBatch:
        if not self._arrays:  # in the worker
            self._arrays = {name: mapped(path) for name, path in self._files.items()}
        held, first = self._arrays, torch.tensor(seeds)
        sample = torch.ops.torch_sparse.neighbor_sample
        n_id, row, col, _ = sample(
            held["indptr"], held["indices"], first, self._fanouts, False, True
        )
        return MappedBatch(
            held["x"][n_id], held["y"][n_id], torch.stack([row, col]), n_id, len(seeds)
        )


def mapped(path: Path) -> Tensor:
    """A tensor over a mapped array, with MADV_RANDOM: a page fault reads one page."""
    array = np.load(path, mmap_mode="c")
    base: Any = array.base
    assert isinstance(base, mmap.mmap)
    base.madvise(mmap.MADV_RANDOM)
    return torch.from_numpy(array)


def check_sampler() -> None:
    """Registers the operator that samples from mapped files.  Raises Skipped: it is not here."""
    try:
        import torch_sparse  # noqa: F401
    except ImportError as error:
        raise Skipped(f"its sampler is torch-sparse's, which is not here: {error}") from error


def mapped_loader(
    graph: Path, csc: Path, seeds: NDArray[np.int64], fanouts: tuple[int, ...], **options: Any
) -> DataLoader[Any]:
    """DataLoader workers, each of which samples and gathers from mapped files.  Raises Skipped."""
    check_sampler()
    return DataLoader(
        seeds.tolist(), shuffle=True, collate_fn=MappedSampler(graph, csc, fanouts), **options
    )


@contextlib.contextmanager
def open_mapped(given: Options, csc: Path, workers: int) -> Iterator[Run]:
    graph = given.graph()
    seeds = seeds_of(graph, given.peer_seeds)
    loader = mapped_loader(
        graph, csc, seeds, given.fanouts, batch_size=given.batch_size, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip
    yield lambda: drain(loader, len(loader))


def pyg_sampler() -> str:
    """What PyG samples with here: pyg-lib is the faster one."""
    for name in ("pyg_lib", "torch_sparse"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "none"


def plans(given: Options) -> Iterator[Plan]:
    """All loaders, by numbers of workers."""
    graph, store = given.graph(), given.store()
    sides = [Side(f"ours, {w or 'auto'} workers", open_ours, (given, w)) for w in given.workers]
    sides += [Side(f"PyG, {w} workers", open_pyg, (given, w, True)) for w in given.pyg_workers]
    if most := max(given.pyg_workers, default=0):
        name = f"PyG, {most} workers, rows gathered in the trainer"
        sides.append(Side(name, open_pyg, (given, most, False)))
    for workers in given.mapped_workers:
        csc = make_csc(store, given.folder)
        sides.append(Side(f"mapped, {workers} workers", open_mapped, (given, csc, workers)))
    forget = functools.partial(drop_cache, graph, given.folder / f"csc-{store.name}")
    setting = {"cache": "cold" if given.cold else "warm", "pyg_sampler": pyg_sampler()}
    yield Plan(sides, setting, before=forget if given.cold else None)
