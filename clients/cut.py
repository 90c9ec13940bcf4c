"""Cut exact smaller batches out of a larger one, without sampling again.

If every hop expands all nodes found so far (frontier "layer"), what is drawn for a seed depends on
that seed and the keys alone.  So a batch contains the batch of each subset of its seeds.
Derivation: docs/derivations/large-batches.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from clients.records import TensorRecord
from clients.torch import Batch
from loaderd.api.errors import Refused

# (hop, original ids of the draws' targets, their columns, slots within these) -> indices of the
# draws to keep, ascending; None: all
Keep = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]

_ABSENT = torch.iinfo(torch.int64).max  # local id of a node not (yet) in the batch being cut


@dataclass(slots=True, repr=False)
class CutStructure(TensorRecord):
    """The structure of a batch that is cut out of a larger one."""

    nodes: Tensor  # int64 (num_nodes,) places among the nodes of the larger batch, the seeds first
    edges: Tensor  # int64 (num_edges,) places among its edges
    edge_index: Tensor  # int64 (2, num_edges) as in `Batch`
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


class BatchCutter:
    """Cuts batches out of one; time and memory of each are linear in the size of the result.

    On a GPU the host waits twice per hop: for the number of edges and that of new nodes.
    """

    def __init__(self, batch: Batch) -> None:
        """Raises Refused: the subgraphs of seeds depend on more than the seeds."""
        if batch.frontier != "layer" or batch.batch is not None:
            found = "times of the seeds" if batch.batch is not None else "frontier 'new'"
            raise Refused(
                f"cutting a batch: found {found}, expected frontier 'layer' and seeds without "
                "times; sample so, or take the batch as it is"
            )
        self._batch = batch
        device, targets = batch.edge_index.device, batch.edge_index[1]
        spans = pairwise(accumulate(batch.num_sampled_edges, initial=0))
        expanded = accumulate(batch.num_sampled_nodes)  # by each hop: its first nodes
        # by hop: int64 (nodes that it expands + 1,) first edge of each
        self._starts = [
            first + torch.searchsorted(targets[first:stop], torch.arange(num + 1, device=device))
            for (first, stop), num in zip(spans, expanded, strict=False)
        ]
        self._first = first_places(batch.n_id[: batch.batch_size])
        self._local = torch.full((batch.num_nodes,), _ABSENT, device=device)

    def structure(self, seeds: Tensor, keep: Keep | None = None) -> CutStructure:
        """What the sampler draws for these seeds alone.

        seeds   int64, places among the seeds of the larger batch, in any order
        keep    which draws are taken; None: all
        """
        local, device = self._local, seeds.device
        nodes, edges, sources, targets = seeds, list[Tensor](), list[Tensor](), list[Tensor]()
        # edges lead from the first of equal seeds, but each of them is expanded
        local.scatter_reduce_(
            0, self._first[seeds], torch.arange(seeds.numel(), device=device), "amin"
        )
        num_nodes = [seeds.numel()]
        for hop, starts in enumerate(self._starts):
            first = starts[nodes]
            counts = starts[nodes + 1] - first
            ends = counts.cumsum(0)
            total = int(ends[-1]) if ends.numel() else 0
            column = torch.repeat_interleave(counts, output_size=total)
            places = torch.arange(total, device=device)
            edge = places + (first - ends + counts)[column]
            if keep is not None:
                slots = places - (ends - counts)[column]
                kept = keep(hop, self._batch.n_id[nodes][column], column, slots)
                if kept is not None:
                    edge, column, places = edge[kept], column[kept], places[: kept.numel()]
            source = self._batch.edge_index[0, edge]
            # a node's number follows from where it is found first: its least place among the edges
            places += nodes.numel()
            local.scatter_reduce_(0, source, places, "amin")
            new = source[local[source] == places]
            local[new] = torch.arange(nodes.numel(), nodes.numel() + new.numel(), device=device)
            edges.append(edge)
            sources.append(local[source])
            targets.append(column)
            nodes = torch.cat([nodes, new])
            num_nodes.append(new.numel())
        local[nodes] = _ABSENT
        local[self._first[seeds]] = _ABSENT
        ends = torch.stack([torch.cat([*sources, seeds[:0]]), torch.cat([*targets, seeds[:0]])])
        return CutStructure(
            nodes, torch.cat([*edges, seeds[:0]]), ends, num_nodes, [e.numel() for e in edges]
        )

    def batch(self, seeds: Tensor, keep: Keep | None = None) -> Batch:
        """The batch of these seeds alone, with its rows; arguments as of `structure`."""
        return self.with_rows(self.structure(seeds, keep), seeds)

    def with_rows(self, cut: CutStructure, seeds: Tensor) -> Batch:
        """The batch with structure `cut`, with its rows."""
        large = self._batch
        return replace(
            large,
            x=None if large.x is None else large.x[cut.nodes],
            y=None if large.y is None else large.y[cut.nodes],
            edge_index=cut.edge_index,
            n_id=large.n_id[cut.nodes],
            e_id=None if large.e_id is None else large.e_id[cut.edges],
            edge_weight=None if large.edge_weight is None else large.edge_weight[cut.edges],
            edge_time=None if large.edge_time is None else large.edge_time[cut.edges],
            input_id=large.input_id[seeds],
            batch_size=seeds.numel(),
            num_sampled_nodes=cut.num_sampled_nodes,
            num_sampled_edges=cut.num_sampled_edges,
            features={name: rows[cut.nodes] for name, rows in large.features.items()},
            edge_features={name: rows[cut.edges] for name, rows in large.edge_features.items()},
        )


def cut_batch(batch: Batch, seeds: Tensor) -> Batch:
    """Cut the batch of some seeds out of a batch with frontier "layer", with the same draws.

    seeds   int64, places among the batch's seeds, in any order

    `BatchCutter` cuts several out of one.  Raises Refused.
    """
    return BatchCutter(batch).batch(seeds)


def first_places(seeds: Tensor) -> Tensor:
    """int64 (seeds,): the first place at which each id occurs."""
    ordered, order = torch.sort(seeds, stable=True)
    places = torch.arange(seeds.numel(), device=seeds.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    heads = order[torch.where(begins, places, 0).cummax(0).values]
    return torch.empty_like(order).scatter_(0, order, heads)
