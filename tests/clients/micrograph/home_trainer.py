"""Models trained on random batches, cut by the owners of their seeds or as one process."""

from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from clients.cut import cut_batch
from clients.micrograph.dataset import HomeBatch
from clients.micrograph.training import HomeOptions, HomeTraining
from clients.ranks import FlatGradients, Ranks
from clients.torch import Batch
from clients.train import UNLABELLED, sum_of_losses
from loaderd.plans.base import Part, share
from loaderd.plans.home import place_seeds
from tests.clients import split_trainer
from tests.clients.split_trainer import NODES, batches_of, logits_of, model_of


class HomeCase(NamedTuple):
    kind: str = "sage"
    dtype: str = "float64"
    ranks: int = 4
    time_steps: int = 1
    merge: str = "server"
    migrate: bool = False
    sync_every: int = 1
    steps: int = 3
    used: int = 0  # ranks that own anything; 0: all of them

    @property
    def plain(self) -> split_trainer.Case:
        return split_trainer.Case(self.kind, "layer", self.dtype)


class Trained(NamedTuple):
    losses: list[float]  # sum over all ranks, of each iteration that tells
    counts: list[int]
    gradients: np.ndarray  # of the last step
    weights: np.ndarray


@cache
def owner_of(ranks: int, used: int) -> np.ndarray:
    return np.random.default_rng(ranks).integers(0, used or ranks, NODES)


def global_batch(case: HomeCase, step: int) -> Batch:
    (batch,) = batches_of(case.plain, step)
    return batch


def home_batch(case: HomeCase, step: int, rank: int) -> HomeBatch:
    """What a rank would be sent."""
    batch = global_batch(case, step)
    owners = owner_of(case.ranks, case.used)[batch.n_id[: batch.batch_size]]
    placed = place_seeds(owners, case.ranks, case.time_steps if case.merge == "model" else 0)
    own = cut_batch(batch, torch.from_numpy(np.flatnonzero(placed == rank)))
    return HomeBatch(
        **{f.name: getattr(own, f.name) for f in fields(Batch)},
        seed_rank=torch.from_numpy(placed.astype(np.int64)),
    )


def at_home(ranks: Ranks, case: HomeCase) -> Trained:
    """One rank of several."""
    model, losses, counts = model_of(case.plain), [], []
    gradients = FlatGradients(model, ranks)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    options = HomeOptions(case.time_steps, case.merge == "model", case.migrate, case.sync_every)
    data: Any = range(case.steps)  # has as many batches
    training = HomeTraining(options, data, gradients, optimizer, ranks)

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.y is not None
        return sum_of_losses(logits_of(model, batch), batch.y[: batch.batch_size])

    for step in data:
        loss, count = training.update(home_batch(case, step, ranks.rank), loss_of)
        losses.append(loss)
        counts.append(count)
    assert training.averaged
    return _trained(model, losses, counts)


def as_one(ranks: Ranks, case: HomeCase) -> Trained:
    """One process on whole batches, with torch's own mean over the labelled seeds."""
    model, losses, counts = model_of(case.plain), [], []
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(case.steps):
        batch = global_batch(case, step)
        y = batch.y[: batch.batch_size]
        loss = functional.cross_entropy(logits_of(model, batch), y, ignore_index=UNLABELLED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts.append(int((y != UNLABELLED).sum()))
        losses.append(loss.item() * counts[-1])
    return _trained(model, losses, counts)


def averaged(ranks: Ranks, case: HomeCase) -> np.ndarray:
    """Weights of separate trainers, one for each share, averaged every so many steps."""
    models = [model_of(case.plain) for _ in range(case.ranks)]
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
    for step in range(case.steps):
        batch = global_batch(case, step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = share(0, 1, batch.batch_size, batch.batch_size, Part(rank, case.ranks))
            y = batch.y[own.start : own.stop]
            logits = logits_of(model, batch)[own.start : own.stop]
            loss, count = sum_of_losses(logits, y)
            optimizer.zero_grad()
            (loss / max(int(count), 1)).backward()
            optimizer.step()
        if step == case.steps - 1 or (step + 1) % case.sync_every == 0:
            for tensors in zip(*map(_state, models, optimizers), strict=True):
                mean = torch.stack([tensor.detach() for tensor in tensors]).mean(0)
                for tensor in tensors:
                    tensor.data.copy_(mean)
    return torch.cat([p.detach().flatten() for p in models[0].parameters()]).numpy()


def _state(model: torch.nn.Module, optimizer: torch.optim.Adam) -> list[Tensor]:
    found = []
    for p in model.parameters():
        found += [p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
    return found


def _trained(model: torch.nn.Module, losses: list[float], counts: list[int]) -> Trained:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return Trained(losses, counts, gradients.numpy(), weights.numpy())
