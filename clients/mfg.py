"""Batches as message-flow graphs, layer by layer, as in DGL and GraphBolt, but in plain tensors.

Both count layers from the input: the first graph has the most nodes, and their fanouts are in the
reverse order of ours and PyG's, which count from the seeds (`layer_fanouts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from clients.records import TensorRecord
from clients.torch import Batch, EdgeType, HeteroBatch, by_type, rows_of_edges


def layer_fanouts(fanouts: Sequence[int]) -> list[int]:
    """DGL's and GraphBolt's fanouts as `num_neighbors`, or the other way round."""
    return list(reversed(fanouts))


def layer_edges(num_sampled_edges: Sequence[int], hop: int, frontier: str) -> slice:
    """The edges of a relation that are used by the layer which computes the targets of a hop.

    If hops expand newly found nodes (frontier "new"), these are the edges of all hops up to this
    one; with frontier "layer", as in DGL, only those of this hop.
    """
    first = sum(num_sampled_edges[:hop]) if frontier == "layer" else 0
    return slice(first, sum(num_sampled_edges[: hop + 1]))


@dataclass(slots=True, repr=False)
class Mfg(TensorRecord):
    """One layer of a batch: edges into the first `num_dst` of its first `num_src` nodes."""

    src: Tensor  # int64 (num_edges,) places among the batch's nodes
    dst: Tensor  # int64 (num_edges,) the same, ascending
    e_id: Tensor | None  # int64 (num_edges,) original edge ids, if asked for
    num_src: int
    num_dst: int
    edge_features: dict[str, Tensor] = field(default_factory=dict)  # (num_edges, ...), likewise

    @property
    def indptr(self) -> Tensor:
        """int64 (num_dst + 1,): edges of target v are [indptr[v], indptr[v + 1])."""
        return _indptr(self.dst, self.num_dst)


@dataclass(slots=True, repr=False)
class HeteroMfg(TensorRecord):
    """One layer of a batch of several types."""

    relations: dict[EdgeType, Mfg]
    num_src: dict[str, int]
    num_dst: dict[str, int]


def to_mfgs(batch: Batch) -> list[Mfg]:
    """The layers of a batch, that of the input first, with the edges of `layer_edges`; no copy."""
    return [next(iter(layer.relations.values())) for layer in to_hetero_mfgs(by_type(batch))]


def to_hetero_mfgs(batch: HeteroBatch) -> list[HeteroMfg]:
    """As `to_mfgs`, for a batch of several types."""
    reach = {t: list(accumulate(nodes)) for t, nodes in batch.num_sampled_nodes.items()}
    hops = len(next(iter(reach.values()))) - 1
    layers: list[HeteroMfg] = []
    for hop in range(hops):
        found = {}
        for relation, edges in batch.num_sampled_edges.items():
            own = layer_edges(edges, hop, batch.frontier)
            src, dst = batch.edge_index[relation]
            rows = rows_of_edges(batch, relation)
            found[relation] = Mfg(
                src[own], dst[own], None if batch.e_id is None else batch.e_id[relation][own],
                reach[relation[0]][hop + 1], reach[relation[2]][hop],
                {name: values[own] for name, values in rows.items()},
            )  # fmt: skip
        layers.append(
            HeteroMfg(
                found,
                {t: n[hop + 1] for t, n in reach.items()},
                {t: n[hop] for t, n in reach.items()},
            )
        )
    return layers[::-1]


@dataclass(slots=True, repr=False)
class SampledSubgraph(TensorRecord):
    """One layer in GraphBolt's fields: the in-edges of each target (column)."""

    indices: Tensor  # int64 (num_edges,) places among `original_row_node_ids`
    columns: Tensor  # int64 (num_edges,) among `original_column_node_ids`, ascending
    original_column_node_ids: Tensor  # int64 (num_dst,)
    original_row_node_ids: Tensor  # int64 (num_src,)
    original_edge_ids: Tensor | None

    @property
    def indptr(self) -> Tensor:
        """int64 (num_dst + 1,), computed at each call."""
        return _indptr(self.columns, self.original_column_node_ids.numel())


@dataclass(slots=True, repr=False)
class MiniBatch(TensorRecord):
    """A batch in the fields of GraphBolt's `MiniBatch`; layers from the input to the seeds.

    If the store has several types, each tensor becomes a dict by type or, in layers, by
    "src:name:dst"; `node_features` is then keyed by (type, name).
    """

    seeds: Tensor | dict[str, Tensor]  # original ids
    labels: Tensor | dict[str, Tensor] | None  # of the seeds
    input_nodes: Tensor | dict[str, Tensor]  # original ids of all nodes
    sampled_subgraphs: list[SampledSubgraph] | list[dict[str, SampledSubgraph]]
    node_features: dict[str, Tensor] | dict[tuple[str, str], Tensor]
    # of each layer, by name or by ("src:name:dst", name), if asked for
    edge_features: list[dict[str, Tensor]] | list[dict[tuple[str, str], Tensor]]


def to_minibatch(batch: Batch | HeteroBatch) -> MiniBatch:
    """Convert a batch to GraphBolt's fields without copying.

    Features "x" are named "feat", as in GraphBolt's data sets.
    """
    typed = by_type(batch)
    kind, ids = typed.input_type, typed.n_id
    features = {(t, "feat"): x for t, x in typed.x.items()}
    features |= {(t, n): rows for t, own in typed.features.items() for n, rows in own.items()}
    layers = to_hetero_mfgs(typed)
    subgraphs = [
        {":".join(r): _subgraph(m, ids[r[0]], ids[r[2]]) for r, m in layer.relations.items()}
        for layer in layers
    ]
    edge_features = [
        {
            (":".join(r), name): values
            for r, mfg in own.relations.items()
            for name, values in mfg.edge_features.items()
        }
        for own in layers
    ]
    seeds = ids[kind][: batch.batch_size]
    labels = typed.y[kind][: batch.batch_size] if kind in typed.y else None
    if isinstance(batch, HeteroBatch):
        own_labels = None if labels is None else {kind: labels}
        return MiniBatch({kind: seeds}, own_labels, ids, subgraphs, features, edge_features)
    return MiniBatch(
        seeds=seeds,
        labels=labels,
        input_nodes=batch.n_id,
        sampled_subgraphs=[next(iter(layer.values())) for layer in subgraphs],
        node_features={name: rows for (_, name), rows in features.items()},
        edge_features=[{name: rows for (_, name), rows in own.items()} for own in edge_features],
    )


def _subgraph(mfg: Mfg, sources: Tensor, targets: Tensor) -> SampledSubgraph:
    return SampledSubgraph(
        mfg.src, mfg.dst, targets[: mfg.num_dst], sources[: mfg.num_src], mfg.e_id
    )


def _indptr(targets: Tensor, count: int) -> Tensor:
    ends = torch.bincount(targets, minlength=count).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])
