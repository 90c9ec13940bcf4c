"""Train GraphSAGE from a daemon: `python -m clients.train ENDPOINT`."""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from clients.models import GraphSage
from clients.torch import Batch, NeighborDataset
from loaderd.errors import DaemonError

UNLABELLED = -1


class NotTrainable(ValueError):
    """The store does not hold what a classifier is trained on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train."""

    endpoint: str
    epochs: int = 5
    num_neighbors: tuple[int, ...] = (15, 10)
    batch_size: int = 1000
    hidden: int = 128
    learning_rate: float = 0.003
    seed: int = 0


@dataclass(slots=True)
class Clock:
    """Seconds spent waiting for batches, and in all."""

    waiting_s: float = 0.0
    total_s: float = 0.0


def say(line: str) -> None:
    """A line of what the command is to give, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def logits(model: GraphSage, batch: Batch) -> torch.Tensor:
    """Of the batch's seeds."""
    assert batch.x is not None
    out: torch.Tensor = model(
        batch.x.float(), batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges
    )
    return out


def train_epoch(
    model: GraphSage, data: NeighborDataset, optimizer: torch.optim.Optimizer
) -> tuple[float, Clock]:
    """One pass: mean loss over seeds, and where the time went."""
    model.train()
    clock, total, seeds = Clock(), 0.0, 0
    begun = asked = time.perf_counter()
    for batch in data:
        clock.waiting_s += time.perf_counter() - asked
        assert batch.y is not None
        label = batch.y[: batch.batch_size]
        loss = functional.cross_entropy(logits(model, batch), label, ignore_index=UNLABELLED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        total += loss.item() * batch.batch_size
        seeds += batch.batch_size
        asked = time.perf_counter()
    clock.total_s = time.perf_counter() - begun
    return total / max(seeds, 1), clock


@torch.no_grad()
def accuracy(model: GraphSage, data: NeighborDataset) -> float:
    """Share of labelled seeds whose label is the likeliest class; detaches."""
    model.eval()
    right = seeds = 0
    for batch in data:
        assert batch.y is not None
        label = batch.y[: batch.batch_size]
        right += int((logits(model, batch).argmax(dim=1) == label).sum())
        seeds += int((label != UNLABELLED).sum())
    data.close()  # evaluation takes no memory of the daemon's while the model trains
    return right / max(seeds, 1)


def open_split(settings: Settings, split: str, **options: Any) -> NeighborDataset:
    """The dataset of one split."""
    wanted: dict[str, Any] = {
        "num_neighbors": settings.num_neighbors,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "shuffle": split == "train",
    }
    return NeighborDataset(settings.endpoint, split=split, **(wanted | options))


def look_at(settings: Settings) -> tuple[int, int]:
    """Features of a node, and classes among the training labels: one quick pass over them."""
    width = num_classes = 0
    data = open_split(settings, "train", num_neighbors=(1,), shuffle=False)
    for batch in data:
        if batch.x is None or batch.y is None or batch.y.dim() != 1 or batch.x.dim() != 2:
            raise NotTrainable("the store has no features, or not one label a node")
        if batch.y.is_floating_point():
            raise NotTrainable(f"labels are {batch.y.dtype}, expected integers: classes")
        width, num_classes = batch.x.size(1), max(num_classes, int(batch.y.max()) + 1)
    data.close()
    return width, num_classes


def train(settings: Settings) -> float:
    """Train, print a line an epoch, and return the accuracy on the test split."""
    torch.manual_seed(settings.seed)
    width, num_classes = look_at(settings)
    data, valid, test = (open_split(settings, split) for split in ("train", "valid", "test"))
    model = GraphSage(width, settings.hidden, num_classes, len(settings.num_neighbors))
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    for epoch in range(settings.epochs):
        data.set_epoch(epoch)
        loss, clock = train_epoch(model, data, optimizer)
        share = clock.waiting_s / clock.total_s
        say(
            f"epoch {epoch}: loss {loss:.4f}, valid accuracy {accuracy(model, valid):.4f}, "
            f"{clock.total_s:.2f} s, {share:.0%} of it waiting for data"
        )
    data.close()
    result = accuracy(model, test)
    say(f"test accuracy {result:.4f}")
    return result


def main() -> None:
    """Entry point."""
    default = Settings("")
    parser = argparse.ArgumentParser(description="Train GraphSAGE from a daemon.")
    parser.add_argument("endpoint", help="ipc:///path/of/the/socket")
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=default.num_neighbors)
    parser.add_argument("--batch-size", type=int, default=default.batch_size)
    parser.add_argument("--hidden", type=int, default=default.hidden)
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--seed", type=int, default=default.seed)
    arguments = vars(parser.parse_args())
    arguments["num_neighbors"] = tuple(arguments["num_neighbors"])
    try:
        train(Settings(**arguments))
    except (DaemonError, NotTrainable) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
