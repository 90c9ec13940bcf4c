"""Seeds per second of whole loaders, warm: ours, PyG's NeighborLoader, rows of mapped files."""

import argparse
import mmap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from clients.torch import NeighborDataset
from tools.bench.harness import Peer, measure, peak_memory, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving


def drain(loader: Iterable[Any], seeds: int) -> dict[str, float]:
    """Take batches until `seeds` seeds have come; the first batch is not timed."""
    done, begun = 0, 0.0
    for number, batch in enumerate(loader):
        if number == 0:
            begun = time.perf_counter()
            continue
        assert batch.x.size(0) >= batch.batch_size
        done += int(batch.batch_size)
        if done >= seeds:
            break
    return {"seeds_per_s": done / (time.perf_counter() - begun)}


class MappedRows(Dataset[Data]):
    """Minibatches of a plain folder that is only mapped, with MADV_RANDOM: no readahead."""

    def __init__(self, graph: Path, fanouts: tuple[int, ...], batch_size: int) -> None:
        self._graph, self._fanouts, self._batch_size = graph, fanouts, batch_size
        self.seeds = np.load(graph / "train_idx.npy")
        edges = np.load(graph / "edge_index.npy", mmap_mode="r")
        order = np.argsort(edges[1], kind="stable")
        self._sources = np.ascontiguousarray(edges[0][order])
        counts = np.bincount(edges[1], minlength=int(edges.max()) + 1)
        self._indptr = np.concatenate([[0], np.cumsum(counts)])
        self._rows: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.seeds) // self._batch_size

    def __getitem__(self, step: int) -> Data:
        if self._rows is None:  # in the worker
            self._rows = np.load(self._graph / "node_feat.npy", mmap_mode="r")
            base: Any = self._rows.base
            if isinstance(base, mmap.mmap):
                base.madvise(mmap.MADV_RANDOM)
        generator = np.random.default_rng(step)
        nodes = self.seeds[step * self._batch_size : (step + 1) * self._batch_size]
        found = [nodes]
        for fanout in self._fanouts:
            first, degree = self._indptr[nodes], np.diff(self._indptr)[nodes]
            picks = (
                generator.integers(0, 1 << 62, (nodes.size, fanout))
                % np.maximum(degree, 1)[:, None]
            )
            sources = self._sources[np.minimum(first[:, None] + picks, self._sources.size - 1)]
            nodes = np.unique(sources[degree > 0])
            found.append(nodes)
        n_id = np.unique(np.concatenate(found))
        return Data(x=torch.from_numpy(self._rows[n_id]), batch_size=self._batch_size)


def _peers(
    arguments: argparse.Namespace, graph: Path, endpoint: str, fanouts: tuple[int, ...]
) -> list[Peer]:
    edges = torch.from_numpy(np.load(graph / "edge_index.npy"))
    data = Data(
        x=torch.from_numpy(np.load(graph / "node_feat.npy")),
        edge_index=edges,
        y=torch.from_numpy(np.load(graph / "node_label.npy")),
    )
    train = torch.from_numpy(np.load(graph / "train_idx.npy"))
    ours = NeighborDataset(endpoint, num_neighbors=fanouts, batch_size=arguments.batch_size)
    drain(ours, arguments.seeds)  # cold blocks and kernels are not what is measured here
    peers = [Peer("ours", lambda: drain(ours, arguments.seeds))]
    for workers in arguments.pyg_workers:
        loader = NeighborLoader(
            data,
            num_neighbors=list(fanouts),
            input_nodes=train,
            batch_size=arguments.batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        run = _pyg_run(loader, arguments.peer_seeds)
        peers.append(Peer(f"pyg NeighborLoader, {workers} workers", run))
    if arguments.mapped_workers >= 0:
        mapped = MappedRows(graph, fanouts, arguments.batch_size)
        rows = DataLoader(mapped, batch_size=None, num_workers=arguments.mapped_workers)
        name = f"mapped rows, MADV_RANDOM, {arguments.mapped_workers} workers"
        peers.append(Peer(name, _pyg_run(rows, arguments.peer_seeds)))
    return peers


def _pyg_run(loader: Iterable[Any], seeds: int) -> Any:
    def run() -> Mapping[str, float]:
        return drain(loader, seeds)

    return run


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    default = GraphSize()
    parser = argparse.ArgumentParser(prog="tools.bench loaders", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=default.nodes)
    parser.add_argument("--degree", type=int, default=default.degree)
    parser.add_argument("--features", type=int, default=default.features)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10, 10))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=90_000, help="that we are timed over")
    parser.add_argument("--peer-seeds", type=int, default=20_000, help="that peers are timed over")
    parser.add_argument("--pyg-workers", type=int, nargs="*", default=(0, 2, 4))
    parser.add_argument("--mapped-workers", type=int, default=4, help="-1: leave it out")
    parser.add_argument("--mem", default="4G")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(words)
    folder, fanouts = Path(arguments.folder), tuple(arguments.fanouts)
    size = GraphSize(arguments.nodes, arguments.degree, arguments.features)
    graph = make_graph(folder, size)
    store = make_store(folder, graph)
    with (
        serving(store, folder, arguments.mem, "--workers", str(arguments.workers)) as endpoint,
        peak_memory() as peak,
    ):
        found = measure(_peers(arguments, graph, endpoint, fanouts), arguments.rounds)
        setting = {
            "nodes": size.nodes, "edges": size.nodes * size.degree, "features": size.features,
            "fanouts": list(fanouts), "batch_size": arguments.batch_size, "cache": "warm",
            "peak_bytes_all": peak(),
        }  # fmt: skip
    return report("loaders", setting, found, arguments.out)
