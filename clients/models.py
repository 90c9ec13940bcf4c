"""Reference models in plain torch: no graph library needed."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockstore.kernels.random import make_key
from clients.aggregate import KERNELS, count_edges, mean_of_neighbors
from clients.hashing import draw_hash, node_key
from clients.mfg import layer_edges
from clients.torch import EdgeType, HeteroBatch

Layer = Callable[[int, int], "OrderedLayer"]  # of widths in and out
# fetches rows of nodes that other processes compute: (rows of the first own nodes, int64
# (2, num_edges) edges of the layer that computes the targets of a hop, the hop) -> (rows of all
# sources of these edges, own ones first, the edges with sources renumbered to them)
RowExchange = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
# sees and may replace the output of each layer but the last: (rows of its targets after the
# activation and before dropout, number of the layer) -> such rows
Activations = Callable[[Tensor, int], Tensor]


def keep_mask(ids: Tensor, width: int, rate: float, key: int) -> Tensor:
    """Mask of what dropout keeps: bool (num_nodes, width), True with probability 1 - rate.

    ids    int64 (num_nodes,)  a row of the mask depends only on its id and `key`
    rate   in steps of 2^-16, below 1

    Each hash gives four entries: 16 bits each of `draw_hash` of `blockstore.kernels.random`.
    """
    words = torch.arange(-(-width // 4), device=ids.device)
    lanes = draw_hash(node_key(key, ids)[:, None], words).view(torch.int16)
    return lanes[:, :width] >= round(rate * 2**16) - 2**15


class DropoutKeys(NamedTuple):
    """The keys of a batch's dropout, in addition to the layer and the node.

    A node has the same mask in every process that computes it, whatever other nodes it computes.
    """

    seed: int
    epoch: int
    step: int
    n_id: Mapping[str, Tensor]  # int64 original ids of the batch's nodes, by type ("" if untyped)


class Dropout(nn.Module):
    """Dropout by torch's generator, or by keys."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(
        self, h: Tensor, keys: DropoutKeys | None, layer: int, node_type: str = ""
    ) -> Tensor:
        """`h`: (num_nodes, width) of the batch's first nodes of a type."""
        if keys is None or not self.training:
            return functional.dropout(h, self.rate, self.training)
        # neighbor draws use relations from 0 on, masks negative ones: they never share a key
        relation = -1 - list(keys.n_id).index(node_type)
        key = make_key(keys.seed, keys.epoch, keys.step, layer, relation)
        keep = keep_mask(keys.n_id[node_type][: h.size(0)], h.size(1), self.rate, key)
        return torch.where(keep, h / (1 - self.rate), 0.0)


class OrderedLayer(nn.Module):
    """A layer that can multiply rows by its weights either before or after aggregating them.

    Both orders give the same up to rounding.  A(XW) aggregates narrower rows if the layer reduces
    the width; (AX)W multiplies only the rows of targets, which are fewer than sources.
    """

    aggregates_first: bool  # (AX)W
    kernels: tuple[str, ...] = tuple(KERNELS)  # that it supports
    kernel = "embedding_bag"  # the one in use

    # -- the same in two halves, for clients/inference, which cannot hold rows of all nodes --------

    num_out: int
    parts: int  # number of parts of the result that can be computed independently
    source_width = 1  # numbers that a source contributes to a part
    target_width = 1  # numbers that a target contributes to a part
    shared_width = 0  # how many of these, at the front, equal the node's as a source
    adds = False  # the result is the mean over sources plus the target's contribution

    @abstractmethod
    def sources(self, h: Tensor) -> Tensor:
        """Contributions of nodes to the targets of their edges: (n, parts, source_width)."""

    @abstractmethod
    def targets(self, h: Tensor) -> Tensor:
        """Contributions of nodes to their own result: (n, parts, target_width)."""

    @abstractmethod
    def join(self, sources: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor:
        """The result, or some consecutive parts of it.

        sources     (sources, some parts, source_width)
        targets     (targets, these parts, target_width)
        edge_index  int64 (2, num_edges)   targets ascending

        Returns (targets, numbers of these parts): as `forward`, up to rounding.
        """


class SageLayer(OrderedLayer):
    """The node itself plus the mean over its in-neighbors: W_self h_v + W_nbr mean(h_u).

    Source: Hamilton, Ying and Leskovec, Inductive Representation Learning on Large Graphs,
    NeurIPS 2017.
    """

    adds = True

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.neighbor = nn.Linear(num_in, num_out, bias=False)
        self.own = nn.Linear(num_in, num_out)
        self.aggregates_first = num_out >= num_in
        self.num_out = self.parts = num_out

    def forward(self, h: Tensor, own: Tensor, edge_index: Tensor) -> Tensor:
        """(sources, num_in), (targets, num_in) -> (targets, num_out)."""
        first = self.aggregates_first
        h = h if first else self.neighbor(h)
        mean = mean_of_neighbors(h, edge_index, own.size(0), self.kernel)
        out: Tensor = (self.neighbor(mean) if first else mean) + self.own(own)
        return out

    def sources(self, h: Tensor) -> Tensor:
        out: Tensor = self.neighbor(h)
        return out[..., None]

    def targets(self, h: Tensor) -> Tensor:
        out: Tensor = self.own(h)
        return out[..., None]

    def join(self, sources: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor:
        return mean_of_neighbors(sources.flatten(1), edge_index, targets.size(0)) + targets[..., 0]


class GcnLayer(OrderedLayer):
    """Mean over in-neighbors and the node itself: W (h_v + sum h_u) / (1 + edges of v).

    Rows are normalised, not both ends: the mean of a sample is unbiased, and degrees of sources are
    not known.  Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional
    Networks, ICLR 2017; Hamilton et al., NeurIPS 2017, equation 2 ("GCN").
    """

    shared_width = 1

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)
        self.aggregates_first = True
        self.num_out = self.parts = num_out

    def forward(self, h: Tensor, own: Tensor, edge_index: Tensor) -> Tensor:
        """(sources, num_in), (targets, num_in) -> (targets, num_out)."""
        counts = count_edges(edge_index[1], own.size(0))[:, None]
        if not self.aggregates_first:
            h, own = (functional.linear(rows, self.linear.weight) for rows in (h, own))
        mixed = self._mix(h, own, edge_index, counts)
        return self.linear(mixed) if self.aggregates_first else mixed + self.linear.bias

    def _mix(self, h: Tensor, own: Tensor, edge_index: Tensor, counts: Tensor) -> Tensor:
        """Mean over the node itself and its neighbors; `counts`: (targets, 1), of neighbors."""
        mean = mean_of_neighbors(h, edge_index, own.size(0), self.kernel)
        mixed: Tensor = (own + mean * counts) / (1 + counts)
        return mixed

    def sources(self, h: Tensor) -> Tensor:
        out: Tensor = self.linear(h)
        return out[..., None]

    def targets(self, h: Tensor) -> Tensor:
        return self.sources(h)

    def join(self, sources: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor:
        counts = count_edges(edge_index[1], targets.size(0))[:, None]
        return self._mix(sources.flatten(1), targets[..., 0], edge_index, counts)


class GatLayer(OrderedLayer):
    """Attention over in-neighbors and the node itself, by several heads side by side.

    Source: Veličković et al., Graph Attention Networks, ICLR 2018.
    """

    kernels, kernel = ("index_add",), "index_add"  # each head weights the edges differently

    def __init__(self, num_in: int, num_out: int, heads: int = 4) -> None:
        """`num_out` counts all heads together; if `heads` does not divide it, there is one head."""
        super().__init__()
        self.heads = heads if num_out % heads == 0 else 1
        self.linear = nn.Linear(num_in, num_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(num_out))
        shape = (self.heads, num_out // self.heads)
        self.from_source = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.from_target = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.aggregates_first = False
        # per head: the row, then its score as a source; for targets then its score as a target
        self.num_out, self.parts = num_out, self.heads
        self.source_width, self.target_width = shape[1] + 1, shape[1] + 2
        self.shared_width = self.source_width

    def forward(self, h: Tensor, own: Tensor, edge_index: Tensor) -> Tensor:
        """(sources, num_in), (targets, num_in) -> (targets, num_out).

        (AX)W computes scores from x as x (W^T a), and aggregates rows of x for each head.
        """
        src, dst = edge_index[0], edge_index[1]
        weight = self.linear.weight.view(*self.from_source.shape, -1)  # (heads, out, in)
        if self.aggregates_first:
            to_score = [
                torch.einsum("ho,hoi->ih", a, weight) for a in (self.from_source, self.from_target)
            ]
            of_sources, alone, asked = h @ to_score[0], own @ to_score[0], own @ to_score[1]
            sources, targets = h[:, None], own[:, None]  # the same for all heads
        else:
            sources = self.linear(h).view(-1, *self.from_source.shape)
            targets = self.linear(own).view(-1, *self.from_source.shape)
            of_sources, alone = ((x * self.from_source).sum(-1) for x in (sources, targets))
            asked = (targets * self.from_target).sum(-1)  # (targets, heads)
        shares, own_share, total = self._shares(of_sources, alone, asked, edge_index)
        mixed = own_share[..., None] * targets
        mixed = mixed.index_add(0, dst, shares[..., None] * sources[src])
        mixed = mixed / total[..., None]
        if self.aggregates_first:
            mixed = torch.einsum("nhi,hoi->nho", mixed, weight)
        out: Tensor = mixed.flatten(1) + self.bias
        return out

    def _shares(
        self, of_sources: Tensor, alone: Tensor, asked: Tensor, edge_index: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shares of edges, of the targets themselves, and their sums, each (..., heads).

        of_sources  (sources, heads)  scores; `alone`, `asked` (targets, heads): those of targets as
                                      sources and as targets
        """
        src, dst = edge_index[0], edge_index[1]
        scores = functional.leaky_relu(of_sources[src] + asked[dst], 0.2)
        alone = functional.leaky_relu(alone + asked, 0.2)
        index = dst[:, None].expand_as(scores)
        top = alone.scatter_reduce(0, index, scores, "amax").detach()
        shares, own_share = (scores - top[dst]).exp(), (alone - top).exp()
        return shares, own_share, own_share.scatter_add(0, index, shares)

    def sources(self, h: Tensor) -> Tensor:
        rows = self.linear(h).view(-1, *self.from_source.shape)
        # attention shares add up to 1, so adding the bias to each row adds it once to the result
        biased = rows + self.bias.view(*self.from_source.shape)
        return torch.cat([biased, (rows * self.from_source).sum(-1, keepdim=True)], -1)

    def targets(self, h: Tensor) -> Tensor:
        rows = self.linear(h).view(-1, *self.from_source.shape)
        asked = (rows * self.from_target).sum(-1, keepdim=True)
        return torch.cat([self.sources(h), asked], -1)

    def join(self, sources: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor:
        """Rows are added up by one embedding bag per target: no row per edge is materialized."""
        (src, dst), (_, heads, width) = edge_index, sources.shape
        shares, own_share, total = self._shares(
            sources[..., -1], targets[..., -2], targets[..., -1], edge_index
        )
        counts = count_edges(dst, targets.size(0))
        starts, flat = counts.cumsum(0) - counts, sources.reshape(-1, width)
        mixed = own_share[..., None] * targets[..., : width - 1]
        for head in range(heads):
            mixed[:, head] += functional.embedding_bag(
                src * heads + head, flat, starts, mode="sum",
                per_sample_weights=shares[:, head].contiguous(),
            )[:, : width - 1]  # fmt: skip
        return (mixed / total[..., None]).flatten(1)


LAYERS: dict[str, Layer] = {"sage": SageLayer, "gcn": GcnLayer, "gat": GatLayer}


class Layered(nn.Module):
    """Layers of one kind, with ReLU and dropout between them."""

    def __init__(
        self,
        layer: Layer,
        num_in: int,
        num_hidden: int,
        num_out: int,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        widths = [num_in, *[num_hidden] * (num_layers - 1), num_out]
        self.layers = nn.ModuleList(layer(a, b) for a, b in pairwise(widths))
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes: list[int] | None = None,
        num_sampled_edges: list[int] | None = None,
        frontier: str = "new",
        exchange: RowExchange | None = None,
        keys: DropoutKeys | None = None,
        activations: Activations | None = None,
    ) -> Tensor:
        """Logits of all nodes, or, with the counts of a sampled batch, of its seeds only.

        With counts, each layer leaves out the outermost hops, which cannot reach a seed through the
        remaining layers: the same result for the seeds, with less work.

        frontier   that of the batch
        exchange   fetches rows for edges from nodes of other processes, if a batch has any
        keys       of dropout; None: masks from torch's generator
        """
        h, depth = x, len(self.layers)
        for number, layer in enumerate(self.layers):
            targets, rows, edges = h.size(0), h, edge_index
            if num_sampled_nodes is not None and num_sampled_edges is not None:
                hop = depth - number - 1
                targets = sum(num_sampled_nodes[: hop + 1])
                edges = edge_index[:, layer_edges(num_sampled_edges, hop, frontier)]
                if exchange is not None:
                    rows, edges = exchange(h, edges, hop)
            h = layer(rows, h[:targets], edges)
            if number < depth - 1:
                h = functional.relu(h)
                if activations is not None:
                    h = activations(h, number)
                h = self.dropout(h, keys, number)
        return h


class GraphSage(Layered):
    """GraphSAGE with mean aggregation."""

    def __init__(
        self, num_in: int, num_hidden: int, num_out: int, num_layers: int = 2, dropout: float = 0.5
    ) -> None:
        super().__init__(SageLayer, num_in, num_hidden, num_out, num_layers, dropout)


class RelationalModel(nn.Module):
    """The next h of a type is the sum of the outputs of the layers of all relations into it.

    Features of each type are projected to one width first; a type without features has a learned
    vector, the same for all its nodes.  Source: Schlichtkrull et al., Modeling Relational Data with
    Graph Convolutional Networks, ESWC 2018.
    """

    def __init__(
        self,
        layer: Layer,
        widths: Mapping[str, int],
        relations: Sequence[EdgeType],
        num_hidden: int,
        num_out: int,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        """`widths`: of the features of each type, 0 for a type without."""
        super().__init__()
        self.relations, self.types = tuple(relations), tuple(widths)
        self.enter = nn.ModuleList(nn.Linear(max(1, widths[t]), num_hidden) for t in self.types)
        self.layers = nn.ModuleList(
            nn.ModuleList(layer(num_hidden, num_hidden) for _ in self.relations)
            for _ in range(num_layers)
        )
        self.out = nn.Linear(num_hidden, num_out)
        self.dropout = Dropout(dropout)

    def forward(self, batch: HeteroBatch, keys: DropoutKeys | None = None) -> Tensor:
        """Logits of the batch's seeds; each layer leaves out the hops that cannot reach them."""
        h = {}
        for name, enter in zip(self.types, self.enter, strict=True):
            ids = batch.n_id[name]
            x = batch.x[name].float() if name in batch.x else ids.new_ones((), dtype=torch.float32)
            h[name] = enter(x.expand(ids.numel(), 1) if x.dim() == 0 else x)
        for number, layers in enumerate(self.layers):
            assert isinstance(layers, nn.ModuleList)
            hop = len(self.layers) - number - 1
            own = {t: h[t][: sum(batch.num_sampled_nodes[t][: hop + 1])] for t in self.types}
            found: dict[str, Tensor] = {}
            for relation, layer in zip(self.relations, layers, strict=True):
                src, _, dst = relation
                used = layer_edges(batch.num_sampled_edges[relation], hop, batch.frontier)
                edges = batch.edge_index[relation][:, used]
                if own[dst].size(0):
                    given = layer(h[src], own[dst], edges)
                    found[dst] = given + found[dst] if dst in found else given
            h = {
                t: self.dropout(functional.relu(found[t]), keys, number, t)
                if t in found
                else own[t]
                for t in self.types
            }
        logits: Tensor = self.out(h[batch.input_type][: batch.batch_size])
        return logits
