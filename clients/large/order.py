"""Find the fastest way to compute a model's layers on this machine by measuring."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from clients.large.batch import FirstLayerRows, FusedBatch, LargeBatch, fused_batches
from clients.models import Layered, OrderedLayer
from clients.torch import Batch

_ROUNDS = 3  # the fastest of these counts


class Order(NamedTuple):
    """How layers are computed: changes the speed, and results only by rounding."""

    fused: bool  # the first layer from the large batch's rows
    aggregates_first: tuple[bool, ...]  # of each layer, the first one first
    kernels: tuple[str, ...]  # likewise, of `clients.aggregate.KERNELS`

    def apply(self, model: Layered) -> None:
        """Set this order in a model's layers."""
        for layer, first, kernel in zip(
            _layers(model), self.aggregates_first, self.kernels, strict=True
        ):
            layer.aggregates_first, layer.kernel = first, kernel

    @classmethod
    def of(cls, model: Layered, fused: bool) -> "Order":
        """The current order of a model's layers."""
        layers = _layers(model)
        firsts = tuple(layer.aggregates_first for layer in layers)
        return cls(fused, firsts, tuple(layer.kernel for layer in layers))

    def changed(self, number: int, kernel: str) -> "Order":
        """The order with another kernel for a layer; "": with its other order of operations."""
        firsts, kernels = list(self.aggregates_first), list(self.kernels)
        if kernel:
            kernels[number] = kernel
        else:
            firsts[number] = not firsts[number]
        return Order(self.fused, tuple(firsts), tuple(kernels))


def measure_order(model: Layered, large: LargeBatch) -> Order:
    """The fastest order, by forward and backward over the steps of a large batch.

    For each layer in turn, tries both orders, then the kernels in the faster one; all with and
    without a fused first layer.  Leaves gradients, and an arbitrary order, in the model.
    """
    found: list[tuple[float, Order]] = []
    for fused in (False, True):
        best = Order.of(model, fused)
        minimum = _seconds(model, best, large)
        for number, layer in enumerate(_layers(model)):
            for kernel in ("", *layer.kernels):
                other = best.changed(number, kernel)
                taken = _seconds(model, other, large) if other != best else minimum
                if taken < minimum:
                    minimum, best = taken, other
        found.append((minimum, best))
    return min(found)[1]


def _layers(model: Layered) -> list[OrderedLayer]:
    return [layer for layer in model.layers if isinstance(layer, OrderedLayer)]


def _seconds(model: Layered, order: Order, large: LargeBatch) -> float:
    """Seconds of forward and backward over all steps, including gathering."""
    order.apply(model)
    device = next(model.parameters()).device
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    minimum = float("inf")
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
        minimum = min(minimum, time.perf_counter() - begun)
    return minimum
