"""Which way of computing a model's layers is the fastest here, by measurement."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from clients.large.batch import LargeBatch
from clients.large.fused import FirstLayerRows, FusedBatch, fused_batches
from clients.models import Layered, OrderedLayer
from clients.torch import Batch

_ROUNDS = 3  # of which the fastest counts


class Order(NamedTuple):
    """How layers are computed: the same results up to rounding, at another speed."""

    fused: bool  # the first layer from the large batch's rows
    aggregates_first: tuple[bool, ...]  # of each layer, the first one first

    def apply(self, model: Layered) -> None:
        """Have a model's layers computed so."""
        for layer, first in zip(_layers(model), self.aggregates_first, strict=True):
            layer.aggregates_first = first


def measure_order(model: Layered, large: LargeBatch) -> Order:
    """The fastest of these, by forward and backward over the steps of a large batch.

    Layer by layer both orders are tried, from the first on, with and without a fused first layer.
    The model is left with gradients, and with some order.
    """
    found: list[tuple[float, Order]] = []
    for fused in (False, True):
        best = Order(fused, tuple(layer.aggregates_first for layer in _layers(model)))
        least = _seconds(model, best, large)
        for number in range(len(best.aggregates_first)):
            orders = list(best.aggregates_first)
            orders[number] = not orders[number]
            other = Order(fused, tuple(orders))
            taken = _seconds(model, other, large)
            if taken < least:
                least, best = taken, other
        found.append((least, best))
    return min(found)[1]


def _layers(model: Layered) -> Iterable[OrderedLayer]:
    return (layer for layer in model.layers if isinstance(layer, OrderedLayer))


def _seconds(model: Layered, order: Order, large: LargeBatch) -> float:
    """Of forward and backward over all steps, gathering included."""
    order.apply(model)
    device = next(model.parameters()).device
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    least = float("inf")
    for _ in range(_ROUNDS):
        wait()
        begun = time.perf_counter()
        batches: Iterable[Batch] = fused_batches(large) if order.fused else large.batches()
        for batch in batches:
            assert batch.x is not None
            exchange = FirstLayerRows(batch) if isinstance(batch, FusedBatch) else None
            counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
            logits = model(batch.x.float(), batch.edge_index, *counts, batch.frontier, exchange)
            torch.autograd.backward(logits.sum())
        wait()
        least = min(least, time.perf_counter() - begun)
    return least
