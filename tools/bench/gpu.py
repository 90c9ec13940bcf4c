"""A GPU trainer: how long it waits for batches, and how much of the link to the device they use."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from clients.device.calibration import MODES
from clients.models import GraphSage
from clients.torch import Batch, NeighborDataset, Prefetcher, prefetch
from tools.bench.harness import Peer, Run, Skipped, measure, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving

NO_DEVICE = 3  # exit code
KEPT = 16  # batches that are trained on again, without waiting for any
COPIES = 8


class Task(NamedTuple):
    """What is trained."""

    endpoint: str
    device: str
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int
    classes: int
    depth: int


class Trainer:
    """GraphSAGE, a step at a time."""

    def __init__(self, task: Task, width: int) -> None:
        torch.manual_seed(0)
        self.model = GraphSage(width, task.hidden, task.classes, len(task.fanouts)).to(task.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.003)

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        assert batch.x is not None
        assert batch.y is not None
        out = self.model(
            batch.x.float(), batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges
        )
        loss = functional.cross_entropy(out, batch.y[: batch.batch_size])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def num_bytes(batch: Batch) -> int:
    """Of a batch's tensors."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    batch.map(count)
    return sum(sizes)


def link_bytes_s(device: str) -> float:
    """The most that page-locked memory is copied to the device with, in one piece."""
    size = 1 << (28 if device.startswith("cuda") else 24)
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    target = torch.empty(size, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(COPIES):
        synchronize(device)
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = max(best, size / (time.perf_counter() - begun))
    return best


def epoch(
    task: Task, batches: Prefetcher[Batch], trainer: Trainer, link: float
) -> dict[str, float]:
    """An epoch of training, one of batches alone, and steps on batches that are there."""
    kept: list[Batch] = []
    waited_s = batches.waited_s
    synchronize(task.device)
    begun = time.perf_counter()
    for batch in batches:
        trainer.step(batch)
        if len(kept) < KEPT:
            kept.append(batch)
    synchronize(task.device)
    train_s = time.perf_counter() - begun
    waited_s = batches.waited_s - waited_s

    begun = time.perf_counter()
    for batch in kept:
        trainer.step(batch)
    synchronize(task.device)
    alone_s = (time.perf_counter() - begun) / len(kept) * len(batches)
    kept.clear()

    begun, delivered = time.perf_counter(), 0
    for batch in batches:
        delivered += num_bytes(batch)
    synchronize(task.device)
    bytes_s = delivered / (time.perf_counter() - begun)
    return {
        "epoch_s": train_s,
        "wait_share": max(0.0, 1 - alone_s / train_s),
        "host_wait_share": waited_s / train_s,
        "batches_gb_s": bytes_s / 1e9,
        "link_gb_s": link / 1e9,
        "link_share": bytes_s / link,
    }


@contextmanager
def open_mode(task: Task, mode: str) -> Iterator[Run]:
    """A trainer that has chosen its way."""
    data = NeighborDataset(task.endpoint, "train", task.fanouts, task.batch_size)
    with prefetch(data, task.device, task.depth, mode) as batches:
        first = next(iter(batches))
        if first.x is None:
            raise Skipped("the store has no features")
        trainer = Trainer(task, first.x.size(1))
        link = link_bytes_s(task.device)
        while batches.choice() is None and (task.device != "cpu" or mode != "auto"):
            for batch in batches:
                trainer.step(batch)

        def run() -> Mapping[str, float]:
            figures = epoch(task, batches, trainer, link)
            choice = batches.choice()
            if choice is not None:
                figures |= {f"{m}_ns_per_row": ns for m, ns in choice.ns_per_row.items()}
                figures |= {
                    "taken": float(MODES.index(choice.mode)),
                    "cached_rows": float(choice.cached_rows),
                }
            return figures

        yield run


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines.  Without a GPU it ends with exit code 3."""
    parser = argparse.ArgumentParser(prog="tools.bench gpu", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--device", default="cuda", help="'cpu': the same steps on the host")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=30)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(15, 10, 5))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mem", default="4G")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=("auto", *MODES))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu: torch finds no CUDA device here; nothing was measured", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    name = torch.cuda.get_device_name(given.device) if given.device != "cpu" else "cpu"
    folder, size = Path(given.folder), GraphSize(given.nodes, given.degree, given.features, 16)
    store = make_store(folder, make_graph(folder, size))
    with serving(store, folder, given.mem) as endpoint:
        task = Task(
            endpoint, given.device, tuple(given.fanouts), given.batch_size, given.hidden,
            size.classes, given.depth,
        )  # fmt: skip
        found = measure([Peer(m, open_mode, (task, m)) for m in given.modes], given.rounds)
    setting = {
        "device": name, "nodes": given.nodes, "degree": given.degree, "features": given.features,
        "fanouts": list(given.fanouts), "batch_size": given.batch_size, "hidden": given.hidden,
        "mem": given.mem, "depth": given.depth, "cache": "warm",
    }  # fmt: skip
    return report("gpu", setting, found, given.out)
