"""Seeds per second of whole loaders: ours, PyG's NeighborLoader, workers over mapped files."""

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from clients.torch import NeighborDataset
from tools.bench.harness import Peer, Run, Skipped, measure, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving


class Task(NamedTuple):
    """What every loader does: an epoch over the same seeds."""

    graph: Path
    fanouts: tuple[int, ...]
    batch_size: int
    num_seeds: int

    def seeds(self) -> NDArray[np.int64]:
        """Original ids."""
        found: NDArray[np.int64] = np.load(self.graph / "train_idx.npy")[: self.num_seeds]
        if found.size < self.num_seeds:
            raise Skipped(
                f"the graph has {found.size} training nodes, {self.num_seeds} are asked for"
            )
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
def open_ours(task: Task, store: Path, folder: Path, mem: str, workers: int) -> Iterator[Run]:
    """A daemon and one client."""
    with serving(store, folder, mem, "--workers", str(workers)) as endpoint:
        data = NeighborDataset(
            endpoint,
            num_neighbors=task.fanouts,
            batch_size=task.batch_size,
            input_nodes=task.seeds(),
        )
        yield lambda: drain(data, len(data))
        data.close()


@contextlib.contextmanager
def open_pyg(task: Task, workers: int, filter_in_workers: bool) -> Iterator[Run]:
    """PyG's loader over tensors in memory; its sampler turns the edges to CSC beforehand."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
        from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
    except ImportError as error:
        raise Skipped(f"torch_geometric cannot be imported: {error}") from error
    if not WITH_PYG_LIB and not WITH_TORCH_SPARSE:
        raise Skipped("PyG samples with pyg-lib or torch-sparse, and neither is installed")
    arrays = {
        name: torch.from_numpy(np.load(task.graph / f"{file}.npy"))
        for name, file in (("x", "node_feat"), ("y", "node_label"), ("edge_index", "edge_index"))
    }
    loader = NeighborLoader(
        Data(**arrays),
        num_neighbors=list(task.fanouts),
        input_nodes=torch.from_numpy(task.seeds()),
        batch_size=task.batch_size,
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


def make_csc(graph: Path, folder: Path) -> Path:
    """`indptr.npy` and `indices.npy` of the graph; sorted in memory, once."""
    path = folder / f"csc-{graph.name}"
    if not (path / "indptr.npy").exists():
        path.mkdir(parents=True, exist_ok=True)
        src, dst = np.load(graph / "edge_index.npy", mmap_mode="r")
        num_nodes = np.load(graph / "node_label.npy", mmap_mode="r").shape[0]
        np.save(path / "indices.npy", src[np.argsort(dst, kind="stable")])
        counts = np.bincount(dst, minlength=num_nodes)
        np.save(path / "indptr.npy", np.concatenate([[0], np.cumsum(counts)]))
    return path


@contextlib.contextmanager
def open_mapped(task: Task, csc: Path, workers: int) -> Iterator[Run]:
    """DataLoader workers, each of which samples and gathers from mapped files."""
    try:
        import torch_sparse  # noqa: F401  registers the sampler
    except ImportError as error:
        raise Skipped(
            f"its sampler is torch-sparse's, which cannot be imported: {error}"
        ) from error
    loader: DataLoader[Any] = DataLoader(
        task.seeds().tolist(),
        batch_size=task.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=MappedSampler(task.graph, csc, task.fanouts),
    )
    yield lambda: drain(loader, len(loader))


def pyg_sampler() -> str:
    """What PyG samples with here: pyg-lib is the faster one."""
    for name in ("pyg_lib", "torch_sparse"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "none"


def drop_cache(folders: tuple[Path, ...]) -> None:
    """Ask the kernel to forget the pages of all files below."""
    for path in (p for folder in folders for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _parser() -> argparse.ArgumentParser:
    default = GraphSize()
    parser = argparse.ArgumentParser(prog="tools.bench loaders", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=default.nodes)
    parser.add_argument("--degree", type=int, default=default.degree)
    parser.add_argument("--features", type=int, default=default.features)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10, 10))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=100_000, help="of our epoch")
    parser.add_argument("--peer-seeds", type=int, default=40_000, help="of a peer's epoch")
    parser.add_argument("--workers", type=int, nargs="*", default=(0,), help="of the daemon")
    parser.add_argument("--pyg-workers", type=int, nargs="*", default=(0, 2, 4))
    parser.add_argument("--mapped-workers", type=int, nargs="*", default=(4,))
    parser.add_argument("--mem", default="4G")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cold", action="store_true", help="empty the page cache before each round"
    )
    return parser


def _peers(given: argparse.Namespace, graph: Path, folder: Path) -> list[Peer]:
    ours = Task(graph, tuple(given.fanouts), given.batch_size, given.seeds)
    theirs = ours._replace(num_seeds=given.peer_seeds)
    store = make_store(folder, graph)
    peers = [
        Peer(f"ours, {w or 'auto'} workers", open_ours, (ours, store, folder, given.mem, w))
        for w in given.workers
    ]
    for workers in given.pyg_workers:
        peers.append(Peer(f"PyG, {workers} workers", open_pyg, (theirs, workers, True)))
    if busy := [w for w in given.pyg_workers if w]:
        name = f"PyG, {max(busy)} workers, rows gathered in the trainer"
        peers.append(Peer(name, open_pyg, (theirs, max(busy), False)))
    if given.mapped_workers:
        csc = make_csc(graph, folder)
        for workers in given.mapped_workers:
            peers.append(Peer(f"mapped, {workers} workers", open_mapped, (theirs, csc, workers)))
    return peers


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    given = _parser().parse_args(words)
    folder = Path(given.folder)
    size = GraphSize(given.nodes, given.degree, given.features)
    graph = make_graph(folder, size)
    peers = _peers(given, graph, folder)
    forget = functools.partial(drop_cache, (graph, folder / f"csc-{graph.name}"))
    found = measure(peers, given.rounds, forget if given.cold else None)
    setting = {
        "nodes": size.nodes, "edges": size.nodes * size.degree, "features": size.features,
        "fanouts": list(given.fanouts), "batch_size": given.batch_size, "mem": given.mem,
        "cache": "cold" if given.cold else "warm", "pyg_sampler": pyg_sampler(),
    }  # fmt: skip
    return report("loaders", setting, found, given.out)
