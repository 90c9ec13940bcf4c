"""Train on propagated features: `python -m clients.train_hops ENDPOINT --model hoga`."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clients.hopwise.batch import HopBatch
from clients.hopwise.dataset import HopDataset
from clients.hopwise.models import ALONE, make_model
from clients.prefetch import prefetch
from clients.ranks import FlatGradients, Ranks, usable_device
from clients.settings import DEVICE, STORE, NotTrainable, option, run_command
from clients.train import UNLABELLED, optimize, say, seed_classes, sum_of_losses

MODELS = ("linear", "features", "sgc", "sign", "sign-mlp", "hoga")


@dataclass(frozen=True, slots=True)
class HopSettings:
    endpoint: str
    model: str = option("sign", choices=MODELS)
    operator: str = option("", "whose hops are trained on; left out: of all that the store has")
    hops: int = option(-1, "how many of them; -1: all")
    epochs: int = 50
    batch_size: int = 8000
    method: str = option(
        "cr", "of shuffling: chunks, rows, or as a trial advises", choices=("cr", "rr", "advised")
    )
    chunk: int = option(0, "rows of a chunk of cr; 0: as the daemon chooses")
    hidden: int = option(0, "width; 0: as in the model's paper")
    dropout: float = 0.5
    learning_rate: float = 0.001
    seed: int = 0
    device: str = DEVICE
    store: str = STORE


def open_split(settings: HopSettings, split: str) -> HopDataset:
    """The dataset of one split; only the training split is shuffled."""
    wanted: dict[str, Any] = {
        "operators": (settings.operator,) if settings.operator else (),
        "hops": None if settings.hops < 0 else settings.hops,
        "batch_size": settings.batch_size,
        "store": settings.store,
    }
    if split != "train":
        return HopDataset(settings.endpoint, split, shuffle=False, **wanted)
    wanted |= {"chunk": settings.chunk, "seed": settings.seed}
    if settings.method == "advised":
        return HopDataset.advised(settings.endpoint, split, device=settings.device, **wanted)
    wanted["method"] = settings.method
    return HopDataset(settings.endpoint, split, **wanted)


def inputs(settings: HopSettings, batch: HopBatch) -> list[Tensor]:
    """The model's inputs: hop 0 alone, or all hops."""
    x = [hop.float() for hop in (batch.x[:1] if settings.model in ALONE else batch.x)]
    if any(hop.dim() != 2 for hop in x):
        raise NotTrainable("rows are not vectors")
    return x


@torch.no_grad()
def accuracy(settings: HopSettings, model: nn.Module, data: HopDataset) -> float:
    """Share of labelled rows whose label is the most likely class; closes the dataset."""
    model.eval()
    right = rows = 0
    for batch in data:
        batch = batch.to(settings.device)
        assert batch.y is not None
        right += int((model(inputs(settings, batch)).argmax(dim=1) == batch.y).sum())
        rows += int((batch.y != UNLABELLED).sum())
    data.close()
    return right / max(rows, 1)


def look_at(settings: HopSettings) -> tuple[int, int, int]:
    """Row width and number of tensors of a first batch, and number of classes of the store."""
    first = replace(settings, method="cr")  # any order will do
    with contextlib.closing(open_split(first, "train")) as data:
        num_classes = seed_classes(data)
        batch: Any = next(iter(data))
        if batch.y is None or batch.y.dim() != 1 or batch.y.is_floating_point():
            raise NotTrainable("the split has not one class a row")
        x = inputs(settings, batch)
        return x[0].size(1), len(x), num_classes


def train(settings: HopSettings) -> tuple[float, float]:
    """Train, and print a line per epoch; (best accuracy on valid, that on test at that epoch)."""
    usable_device(settings.device)
    torch.manual_seed(settings.seed)
    width, arrays, num_classes = look_at(settings)
    data, valid, test = (open_split(settings, split) for split in ("train", "valid", "test"))
    if data.advice is not None:
        say(f"advice: {data.advice.text}")
    model = make_model(
        settings.model, width, arrays, num_classes, settings.hidden, settings.dropout
    ).to(settings.device)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)

    gradients = FlatGradients(model, Ranks())

    def update(batch: HopBatch) -> tuple[float, int]:
        assert batch.y is not None
        found = gradients.of_mean(*sum_of_losses(model(inputs(settings, batch)), batch.y))
        optimizer.step()
        return found

    ahead, best = prefetch(data, settings.device), (0.0, 0.0)
    for epoch in range(settings.epochs):
        ahead.set_epoch(epoch)
        model.train()
        loss, clock = optimize(ahead, update)
        found = accuracy(settings, model, valid)
        if found >= best[0]:
            best = found, accuracy(settings, model, test)
        say(clock.report(epoch, loss, found))
    ahead.close()
    say(f"test accuracy {best[1]:.4f} where valid was best")
    return best


def main() -> None:
    run_command(HopSettings, __doc__, lambda given: train(HopSettings(**given)))


if __name__ == "__main__":
    main()
