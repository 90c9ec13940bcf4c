"""Reference models in plain torch: no graph library needed."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def mean_of_neighbors(h: Tensor, edge_index: Tensor, num_targets: int) -> Tensor:
    """Mean of h over the sources of each target's edges, 0 where it has none.

    h           (num_nodes, width)
    edge_index  int64 (2, num_edges)    targets below `num_targets`, ascending in sampled batches

    An embedding bag a target: no row per edge is ever held, ten times faster than index_add_.
    """
    src, dst = edge_index[0], edge_index[1]
    if bool((dst[1:] < dst[:-1]).any()):
        dst, order = torch.sort(dst, stable=True)
        src = src[order]
    counts = torch.bincount(dst, minlength=num_targets)
    return functional.embedding_bag(src, h, counts.cumsum(0) - counts, mode="mean")


class SageLayer(nn.Module):
    """Mean over in-neighbors beside the node itself: W_self h_v + W_nbr mean(h_u).

    Source: Hamilton, Ying and Leskovec, Inductive Representation Learning on Large Graphs,
    NeurIPS 2017.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.neighbor = nn.Linear(num_in, num_out, bias=False)
        self.own = nn.Linear(num_in, num_out)

    def forward(self, h: Tensor, edge_index: Tensor, num_targets: int) -> Tensor:
        """(num_nodes, num_in) -> (num_targets, num_out); targets are the first nodes.

        A(XW) where that is narrower than (AX)W: the same up to rounding.
        """
        narrow = self.neighbor.out_features < self.neighbor.in_features
        message = self.neighbor(h) if narrow else h
        mean = mean_of_neighbors(message, edge_index, num_targets)
        out: Tensor = (mean if narrow else self.neighbor(mean)) + self.own(h[:num_targets])
        return out


class GraphSage(nn.Module):
    """GraphSAGE with mean aggregation, ReLU and dropout between layers."""

    def __init__(
        self, num_in: int, num_hidden: int, num_out: int, num_layers: int = 2, dropout: float = 0.5
    ) -> None:
        super().__init__()
        widths = [num_in, *[num_hidden] * (num_layers - 1), num_out]
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in pairwise(widths))
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes: list[int] | None = None,
        num_sampled_edges: list[int] | None = None,
    ) -> Tensor:
        """Logits of all nodes, or, with the counts of a sampled batch, of its seeds only.

        With counts, layer l leaves out the outermost hops, which no seed sees through the layers
        that are left: the same result for the seeds, less work.
        """
        h, depth = x, len(self.layers)
        for number, layer in enumerate(self.layers):
            targets, edges = h.size(0), edge_index
            if num_sampled_nodes is not None and num_sampled_edges is not None:
                reach = depth - number
                edges = edge_index[:, : sum(num_sampled_edges[:reach])]
                targets = sum(num_sampled_nodes[:reach])
            h = layer(h, edges, targets)
            if number < depth - 1:
                h = functional.dropout(functional.relu(h), self.dropout, self.training)
        return h
