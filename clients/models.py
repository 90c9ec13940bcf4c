"""Reference models in plain torch: no graph library needed."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        src, dst = edge_index[0], edge_index[1]
        total = message.new_zeros(num_targets, message.size(1)).index_add_(0, dst, message[src])
        degree = torch.bincount(dst, minlength=num_targets).clamp_(min=1).to(h.dtype)
        mean = total / degree.unsqueeze(1)
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
                hops = min(depth - number, len(num_sampled_edges))
                edges = edge_index[:, : sum(num_sampled_edges[:hops])]
                targets = sum(num_sampled_nodes[:hops])
            h = layer(h, edges, targets)
            if number < depth - 1:
                h = functional.dropout(functional.relu(h), self.dropout, self.training)
        return h
