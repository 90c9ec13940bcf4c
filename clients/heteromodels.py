"""Reference models over several node types: a layer of any kind for each relation, summed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.hetero import HeteroBatch
from clients.models import Layer
from clients.torch import EdgeType


class RelationalModel(nn.Module):
    """h_t of the next layer is the sum over relations into type t of what their layers give.

    Features of each type are brought to one width first; a type without any has a learned vector,
    the same for all of its nodes.  Source: Schlichtkrull et al., Modeling Relational Data with
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
        """`widths`: of the features of each type, 0 where it has none."""
        super().__init__()
        self.relations, self.types = tuple(relations), tuple(widths)
        self.enter = nn.ModuleList(nn.Linear(max(1, widths[t]), num_hidden) for t in self.types)
        self.layers = nn.ModuleList(
            nn.ModuleList(layer(num_hidden, num_hidden) for _ in self.relations)
            for _ in range(num_layers)
        )
        self.out = nn.Linear(num_hidden, num_out)
        self.dropout = dropout

    def forward(self, batch: HeteroBatch) -> Tensor:
        """Logits of the batch's seeds; each layer leaves out the hops that none of them sees."""
        h = {}
        for name, enter in zip(self.types, self.enter, strict=True):
            ids = batch.n_id[name]
            x = batch.x[name].float() if name in batch.x else ids.new_ones((), dtype=torch.float32)
            h[name] = enter(x.expand(ids.numel(), 1) if x.dim() == 0 else x)
        for number, layers in enumerate(self.layers):
            assert isinstance(layers, nn.ModuleList)
            reach = len(self.layers) - number
            own = {t: h[t][: sum(batch.num_sampled_nodes[t][:reach])] for t in self.types}
            found: dict[str, Tensor] = {}
            for relation, layer in zip(self.relations, layers, strict=True):
                src, _, dst = relation
                edges = batch.edge_index[relation][
                    :, : sum(batch.num_sampled_edges[relation][:reach])
                ]
                if own[dst].size(0):
                    given = layer(h[src], own[dst], edges)
                    found[dst] = given + found[dst] if dst in found else given
            h = {
                t: functional.dropout(functional.relu(found[t]), self.dropout, self.training)
                if t in found
                else own[t]
                for t in self.types
            }
        logits: Tensor = self.out(h[batch.input_type][: batch.batch_size])
        return logits
