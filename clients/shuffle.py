"""Exchange rows between the owners of a split batch before each layer, and return gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from clients.split import Exchange, SplitBatch


class Shuffle:
    """The `exchange` that a `clients.models.Layered` takes for a `SplitBatch`.

    All owners compute their pieces of one batch at the same time: each takes part in each exchange,
    forward and backward, in the same order, even if it has no nodes.  The input must require grad
    on all of them or on none.
    """

    def __init__(self, batch: SplitBatch, group: Any, mixed_rows: bool = False) -> None:
        """`group`: of the processes of all owners, in their order, for these exchanges alone.

        mixed_rows   x has rows of remote nodes, too; the model has one layer per hop of the batch
        """
        self._batch, self._group, self._mixed_rows = batch, group, mixed_rows

    def __call__(self, h: Tensor, edge_index: Tensor, hop: int) -> tuple[Tensor, Tensor]:
        """Rows of own nodes, then received ones, and the edges with places in these as sources."""
        batch = self._batch
        if self._mixed_rows and hop == len(batch.exchanges) - 1:
            return h, edge_index
        exchange = _joined(batch.exchanges[hop if batch.frontier == "layer" else 0 : hop + 1])
        rows: Tensor = _Exchanged.apply(h, exchange, self._group)  # type: ignore[no-untyped-call]
        own, remote = batch.n_id.numel(), sum(batch.num_remote_nodes)
        place = exchange.recv.new_empty(own + remote)  # of each node in `rows`
        place[: h.size(0)] = torch.arange(h.size(0), device=place.device)
        arrived = torch.arange(h.size(0), h.size(0) + exchange.recv.numel(), device=place.device)
        place[own + exchange.recv] = arrived
        return rows, torch.stack([place[edge_index[0]], edge_index[1]])


class _Exchanged(torch.autograd.Function):
    """Own and received rows; backward, gradients return and are added up in owner order."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, exchange: Exchange, group: Any) -> Tensor:
        ctx.exchange, ctx.group = exchange, group
        counts = (exchange.recv_counts, exchange.send_counts)
        return torch.cat([h, _all_to_all(h[exchange.send], *counts, group)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        exchange, (grad,) = ctx.exchange, grads
        kept = grad.size(0) - exchange.recv.numel()
        counts = (exchange.send_counts, exchange.recv_counts)
        returned = _all_to_all(grad[kept:].contiguous(), *counts, ctx.group)
        own = grad[:kept].clone()
        # an owner requests each node once, so its piece has at most one gradient per node, and the
        # order of additions is the same on every device
        pieces = (tensor.split_with_sizes(counts[0]) for tensor in (exchange.send, returned))
        for places, values in zip(*pieces, strict=True):
            own.index_add_(0, places, values)
        return own, None, None


def _all_to_all(rows: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Tensor:
    """Send `leaving` rows of `rows` to each owner; returns `arriving` rows from each."""
    out = rows.new_empty(sum(arriving), *rows.shape[1:])
    distributed.all_to_all_single(out, rows, arriving, leaving, group=group)
    return out


def _joined(exchanges: Sequence[Exchange]) -> Exchange:
    """Join exchanges into one: for each owner the rows of the first, then those of the next."""
    return Exchange(
        _join_by_owner((e.send, e.send_counts) for e in exchanges),
        _join_by_owner((e.recv, e.recv_counts) for e in exchanges),
        [sum(counts) for counts in zip(*(e.send_counts for e in exchanges), strict=True)],
        [sum(counts) for counts in zip(*(e.recv_counts for e in exchanges), strict=True)],
    )


def _join_by_owner(parts: Iterable[tuple[Tensor, list[int]]]) -> Tensor:
    pieces = [values.split_with_sizes(counts) for values, counts in parts]
    return torch.cat([piece for owner in zip(*pieces, strict=True) for piece in owner])
