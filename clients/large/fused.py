"""The first layer of a model straight from the rows of a large batch.

A batch's own rows of features are most of what it needs: those of the nodes that its last hop
found, which only the first layer reads.  They need not be gathered, nor edges into them renumbered:
the layer aggregates the large batch's rows by the places of the sources there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from clients.large.batch import LargeBatch
from clients.torch import Batch
from loaderd.api.errors import Refused

__all__ = ["FirstLayerRows", "FusedBatch", "fused_batches"]


@dataclass(slots=True, repr=False, kw_only=True)
class FusedBatch(Batch):
    """A batch whose `x` has the rows of the first layer's targets alone: of all hops but the last.

    Give the model `exchange=FirstLayerRows(batch)`.
    """

    rows: Tensor  # (distinct nodes, width) of the large batch
    places: Tensor  # int64 (num_nodes,) of the batch's nodes among these


class FirstLayerRows:
    """The `RowExchange` of a fused batch: its first layer has the large batch's rows as sources."""

    def __init__(self, batch: FusedBatch) -> None:
        self._batch, self._last = batch, len(batch.num_sampled_edges) - 1

    def __call__(self, h: Tensor, edge_index: Tensor, hop: int) -> tuple[Tensor, Tensor]:
        if hop != self._last:
            return h, edge_index
        batch = self._batch
        return batch.rows, torch.stack([batch.places[edge_index[0]], edge_index[1]])


def fused_batches(large: LargeBatch) -> Iterator[FusedBatch]:
    """The batch of each step, in order.  Raises Refused: there are no features."""
    rows = large.rows()
    if rows is None:
        raise Refused("fused batches: found a store without features, expected a vector a node")
    rows = rows.float()
    for batch, places in large.cuts():
        own = {f.name: getattr(batch, f.name) for f in fields(Batch)}
        own["x"] = rows[places[: sum(batch.num_sampled_nodes[:-1])]]
        yield FusedBatch(**own, rows=rows, places=places)
