"""A GPU trainer: how long it waits for batches, and how much of the link to the device they use.

All modes at one daemon.  Without a GPU it ends with exit code 3.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.nn import functional

from clients.device.calibration import MODES
from clients.models import GraphSage
from clients.torch import Batch, NeighborDataset, Prefetcher, prefetch
from tools.bench.harness import BenchPlan, GraphOptions, Run, Side, SideSkipped
from tools.bench.setup import CLASSES, serving

NO_DEVICE = 3  # exit code
KEPT = 16  # batches that are trained on again without waiting
COPIES = 8


@dataclass(frozen=True)
class GpuOptions(GraphOptions):
    device: Annotated[str, "'cpu': the same steps on the host"] = "cuda"
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10, 5)
    hidden: int = 256
    mem: str = "4G"
    depth: int = 3
    modes: tuple[str, ...] = ("auto", *MODES)


class SageTrainer:
    """GraphSAGE, a step at a time."""

    def __init__(
        self, device: str, width: int, hidden: int, classes: int, fanouts: Sequence[int]
    ) -> None:
        torch.manual_seed(0)
        self.model = GraphSage(width, hidden, classes, len(fanouts)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.003, fused=True)

    def step(self, batch: Batch) -> None:
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
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def num_bytes(batch: Batch) -> int:
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    batch.map(count)
    return sum(sizes)


def link_bytes_s(device: str) -> float:
    """The highest measured rate of a copy from page-locked memory to the device, in one piece."""
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
    task: GpuOptions, batches: Prefetcher[Batch], trainer: SageTrainer, link: float
) -> dict[str, float]:
    """Run an epoch of training, steps on kept batches, and an epoch without training."""
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
        "epoch_s": train_s, "wait_share": max(0.0, 1 - alone_s / train_s),
        "host_wait_share": waited_s / train_s, "batches_gb_s": bytes_s / 1e9,
        "link_gb_s": link / 1e9, "link_share": bytes_s / link,
    }  # fmt: skip


def open_mode(task: GpuOptions, endpoint: str, mode: str) -> Iterator[Run]:
    """Rounds of a trainer in one mode, after "auto" has chosen."""
    # a seed of its own, or it would share a stream with sides that are not reading now
    seed = task.modes.index(mode)
    data = NeighborDataset(endpoint, "train", task.fanouts, task.batch_size, seed=seed)
    with prefetch(data, task.device, task.depth, mode) as batches:
        first = next(iter(batches))
        if first.x is None:
            raise SideSkipped("the store has no features")
        trainer = SageTrainer(task.device, first.x.size(1), task.hidden, CLASSES, task.fanouts)
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


def gpu(given: GpuOptions) -> Iterator[BenchPlan]:
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu: torch finds no CUDA device here; nothing was measured", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    name = torch.cuda.get_device_name(given.device) if given.device != "cpu" else "cpu"
    with serving(given.store(), given.folder, given.mem) as endpoint:
        sides = [Side(mode, open_mode, (given, endpoint, mode)) for mode in given.modes]
        yield BenchPlan(sides, {"device": name, "cache": "warm"})
