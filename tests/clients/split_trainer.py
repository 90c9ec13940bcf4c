"""Models trained on random batches, whole in one process or split by owner over ranks."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import functional

from blockstore.kernels.random import make_key
from clients.mfg import layer_edges
from clients.models import LAYERS, DropoutKeys, Layered
from clients.ranks import FlatGradients, Ranks
from clients.shuffle import Shuffle
from clients.split import SplitBatch
from clients.torch import Batch
from clients.train import UNLABELLED, sum_of_losses
from tests.split_reference import split

NODES, WIDTH, CLASSES, FANOUTS = 60, 6, 4, (3, 2, 2)
RATE = 0.5
DIFFERENT = 3  # batches
make_key(0, 0, 0, 0, 0)  # compiled, or loaded, before processes are forked


class Case(NamedTuple):
    kind: str = "sage"
    frontier: str = "new"
    dtype: str = "float64"
    owners: int = 2
    used: int = 0  # owners that own anything; 0: all of them
    shares: int = 1  # of which each has a batch of its own in each step
    steps: int = 1
    learning_rate: float = 0.01


class Trained(NamedTuple):
    logits: np.ndarray  # (own seeds, classes) of the last step
    places: list[int]  # of these seeds in the step
    losses: list[float]  # mean over the labelled seeds of each step
    gradients: np.ndarray  # of the last step
    weights: np.ndarray


@cache
def sampled(frontier: str, number: int, share: int) -> Batch:
    """A batch of a random graph; every fourth label is missing."""
    rng = np.random.default_rng([number, share])
    rows = torch.from_numpy(np.random.default_rng(5).standard_normal((NODES, WIDTH)))
    found = rng.permutation(NODES)[: 9 + share].tolist()
    nodes, counts, edges = [len(found)], [], []
    begin = 0
    for fanout in FANOUTS:
        end, first = len(found), 0 if frontier == "layer" else begin
        counts.append(0)
        for target in range(first, end):
            for node in rng.integers(0, NODES, rng.integers(0, fanout + 1)).tolist():
                found += [node] * (node not in found)
                edges.append((found.index(node), target))
                counts[-1] += 1
        begin = end
        nodes.append(len(found) - end)
    n_id = torch.tensor(found)
    return Batch(
        x=rows[n_id],
        y=torch.where(n_id % 4 == 3, UNLABELLED, n_id % CLASSES),
        edge_index=torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous(),
        n_id=n_id, e_id=None, input_id=torch.arange(nodes[0]), batch_size=nodes[0],
        num_sampled_nodes=nodes, num_sampled_edges=counts, epoch=0, step=number,
        frontier=frontier,
    )  # fmt: skip


def model_of(case: Case) -> Layered:
    torch.manual_seed(3)
    model = Layered(LAYERS[case.kind], WIDTH, 8, CLASSES, len(FANOUTS), RATE)
    return model.to(getattr(torch, case.dtype))


def batches_of(case: Case, step: int) -> list[Batch]:
    """Those of the shares; a few come again and again."""
    found = [sampled(case.frontier, step % DIFFERENT, share) for share in range(case.shares)]
    return [replace(batch, step=step) for batch in found]


def piece_of(case: Case, step: int, rank: int, mixed_rows: bool = False) -> SplitBatch:
    """What a rank computes of a step, the owners being drawn at random."""
    share, owner = divmod(rank, case.owners)
    used = case.used or case.owners
    pieces = pieces_of(case.frontier, step % DIFFERENT, share, case.owners, used, mixed_rows)
    return replace(pieces[owner], step=step)


@cache
def pieces_of(
    frontier: str, number: int, share: int, owners: int, used: int, mixed_rows: bool
) -> list[SplitBatch]:
    batch = sampled(frontier, number, share)
    owner = np.random.default_rng(owners).integers(0, used, NODES)
    return split(batch, owner[batch.n_id.numpy()].tolist(), owners, mixed_rows)


def logits_of(model: Layered, batch: Batch | SplitBatch, exchange: Any = None) -> Tensor:
    keys = DropoutKeys(1, batch.epoch, batch.step, {"": batch.n_id})
    counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
    assert batch.x is not None
    x = batch.x.to(next(model.parameters()).dtype)
    return model(x, batch.edge_index, *counts, batch.frontier, exchange, keys)


def alone(ranks: Ranks, case: Case) -> Trained:
    """One process, with torch's own mean over the labelled seeds of all shares."""
    model, losses = model_of(case), []
    optimizer = torch.optim.Adam(model.parameters(), case.learning_rate)
    for step in range(case.steps):
        batches = batches_of(case, step)
        logits = torch.cat([logits_of(model, batch) for batch in batches])
        y = torch.cat([batch.y[: batch.batch_size] for batch in batches])
        loss = functional.cross_entropy(logits, y, ignore_index=UNLABELLED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _trained(model, logits, list(range(len(y))), losses)


def together(
    ranks: Ranks, case: Case, before: Callable[[int], None] = lambda step: None
) -> Trained:
    """One rank of several, with an exchange before each layer; `before` each step."""
    model, losses = model_of(case), []
    gradients = FlatGradients(model, ranks)
    optimizer = torch.optim.Adam(model.parameters(), case.learning_rate)
    group = ranks.split_place(case.owners).group
    for step in range(case.steps):
        before(step)
        piece = piece_of(case, step, ranks.rank)
        logits = logits_of(model, piece, Shuffle(piece, group))
        assert piece.y is not None
        summed = sum_of_losses(logits, piece.y[: piece.batch_size])
        loss, labelled = gradients.of_mean(*summed)
        optimizer.step()
        losses.append(loss / labelled)
    first = batches_of(case, case.steps - 1)[0].batch_size if ranks.rank >= case.owners else 0
    return _trained(model, logits, (piece.input_id + first).tolist(), losses)


def _trained(model: Layered, logits: Tensor, places: list[int], losses: list[float]) -> Trained:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return Trained(logits.detach().numpy(), places, losses, gradients.numpy(), weights.numpy())


def exchanged(ranks: Ranks, case: Case) -> list[tuple[list[int], list[int]]]:
    """Rows that a rank sends to each owner, and gets, in each exchange of a training step."""
    calls, plain = [], distributed.all_to_all_single

    def noted(out: Tensor, rows: Tensor, arriving: Any, leaving: Any, group: Any) -> None:
        assert (out.size(0), rows.size(0)) == (sum(arriving), sum(leaving))
        calls.append((leaving, arriving))
        plain(out, rows, arriving, leaving, group=group)

    distributed.all_to_all_single = noted
    try:
        together(ranks, case)
    finally:
        distributed.all_to_all_single = plain
    return calls


def sources(ranks: Ranks, case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Input rows of the sources of the first layer's edges: exchanged, and gathered with x."""
    shuffled, mixed = (piece_of(case, 0, ranks.rank, mixed_rows) for mixed_rows in (False, True))
    group, hop, found = ranks.split_place(case.owners).group, len(FANOUTS) - 1, []
    for piece, has_rows in ((shuffled, False), (mixed, True)):
        used = piece.edge_index[:, layer_edges(piece.num_sampled_edges, hop, piece.frontier)]
        rows, edges = Shuffle(piece, group, has_rows)(piece.x, used, hop)
        found.append((rows[edges[0]].numpy(), edges[1].numpy()))
    return found


def until_lost(ranks: Ranks, case: Case, rank: int, how: signal.Signals) -> None:
    """A rank sends itself a signal after some steps."""

    def before(step: int) -> None:
        if (ranks.rank, step) == (rank, 3):
            os.kill(os.getpid(), how)

    together(ranks, case, before)
