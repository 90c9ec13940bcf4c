"""Batches as message-flow graphs, layer by layer: what DGL and GraphBolt give, as plain tensors.

Both count layers from the input: the first graph has the most nodes, and their fanouts run the
other way round from ours and PyG's, which count from the seeds (`layer_fanouts`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from clients.hetero import HeteroBatch
from clients.records import TensorRecord
from clients.torch import Batch, EdgeType


def layer_fanouts(fanouts: Sequence[int]) -> list[int]:
    """DGL's and GraphBolt's fanouts as `num_neighbors`, or the other way round."""
    return list(reversed(fanouts))


@dataclass(slots=True, repr=False)
class Mfg(TensorRecord):
    """One layer of a batch: edges into the first `num_dst` of its first `num_src` nodes."""

    src: Tensor  # int64 (num_edges,) places among the batch's nodes
    dst: Tensor  # int64 (num_edges,) the same, ascending
    e_id: Tensor | None  # int64 (num_edges,) original edge ids, where asked for
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
    """The layers of a batch, that of the input first; nothing is copied.

    Where hops expand newly found nodes (frontier "new"), a layer has the edges of all hops that it
    needs; of frontier "layer", as in DGL, those of its own hop.
    """
    src, dst = batch.edge_index
    spans = _spans(batch.num_sampled_edges, batch.frontier)
    reach = list(accumulate(batch.num_sampled_nodes))
    layers = [
        Mfg(
            src[low:high],
            dst[low:high],
            _piece(batch.e_id, low, high),
            reach[hop + 1],
            reach[hop],
            _pieces(batch.edge_features, low, high),
        )
        for hop, (low, high) in enumerate(spans)
    ]
    return layers[::-1]


def to_hetero_mfgs(batch: HeteroBatch) -> list[HeteroMfg]:
    """The same of a batch of several types."""
    reach = {t: list(accumulate(nodes)) for t, nodes in batch.num_sampled_nodes.items()}
    hops = len(next(iter(reach.values()))) - 1
    layers: list[HeteroMfg] = []
    for hop in range(hops):
        found = {}
        for relation, edges in batch.num_sampled_edges.items():
            low, high = _spans(edges, batch.frontier)[hop]
            src, dst = batch.edge_index[relation]
            e_id = None if batch.e_id is None else _piece(batch.e_id[relation], low, high)
            found[relation] = Mfg(
                src[low:high], dst[low:high], e_id, reach[relation[0]][hop + 1],
                reach[relation[2]][hop],
                _pieces(batch.edge_features.get(relation, {}), low, high),
            )  # fmt: skip
        layers.append(
            HeteroMfg(
                found,
                {t: n[hop + 1] for t, n in reach.items()},
                {t: n[hop] for t, n in reach.items()},
            )
        )
    return layers[::-1]


def _spans(edges_per_hop: Sequence[int], frontier: str) -> list[tuple[int, int]]:
    """First and last edge of each hop's layer."""
    ends = [0, *accumulate(edges_per_hop)]
    return [(low if frontier == "layer" else 0, high) for low, high in pairwise(ends)]


def _piece(values: Tensor | None, low: int, high: int) -> Tensor | None:
    return None if values is None else values[low:high]


def _pieces(rows: Mapping[str, Tensor], low: int, high: int) -> dict[str, Tensor]:
    return {name: values[low:high] for name, values in rows.items()}


@dataclass(slots=True, repr=False)
class SampledSubgraph(TensorRecord):
    """One layer in GraphBolt's fields: in-edges of each target, by column."""

    indices: Tensor  # int64 (num_edges,) places among `original_row_node_ids`
    columns: Tensor  # int64 (num_edges,) among `original_column_node_ids`, ascending
    original_column_node_ids: Tensor  # int64 (num_dst,)
    original_row_node_ids: Tensor  # int64 (num_src,)
    original_edge_ids: Tensor | None

    @property
    def indptr(self) -> Tensor:
        """int64 (num_dst + 1,), counted when asked for."""
        return _indptr(self.columns, self.original_column_node_ids.numel())


@dataclass(slots=True, repr=False)
class MiniBatch(TensorRecord):
    """A batch in the fields of GraphBolt's `MiniBatch`; layers from the input to the seeds.

    Of a store of several types what is a tensor here is a dict, by type or, of layers, by
    "src:name:dst"; `node_features` is by (type, name) then.
    """

    seeds: Tensor | dict[str, Tensor]  # original ids
    labels: Tensor | dict[str, Tensor] | None  # of the seeds
    input_nodes: Tensor | dict[str, Tensor]  # original ids of all nodes
    sampled_subgraphs: list[SampledSubgraph] | list[dict[str, SampledSubgraph]]
    node_features: dict[str, Tensor] | dict[tuple[str, str], Tensor]
    # of each layer, by name or by ("src:name:dst", name), where asked for
    edge_features: list[dict[str, Tensor]] | list[dict[tuple[str, str], Tensor]]


def to_minibatch(batch: Batch | HeteroBatch) -> MiniBatch:
    """A batch as GraphBolt names it; nothing is copied.

    Features "x" are named "feat", as in GraphBolt's data sets.
    """
    if isinstance(batch, HeteroBatch):
        return _hetero_minibatch(batch)
    features = {"feat": batch.x} | batch.features if batch.x is not None else batch.features
    layers = to_mfgs(batch)
    return MiniBatch(
        seeds=batch.n_id[: batch.batch_size],
        labels=None if batch.y is None else batch.y[: batch.batch_size],
        input_nodes=batch.n_id,
        sampled_subgraphs=[_subgraph(mfg, batch.n_id, batch.n_id) for mfg in layers],
        node_features=features,
        edge_features=[layer.edge_features for layer in layers],
    )


def _hetero_minibatch(batch: HeteroBatch) -> MiniBatch:
    kind, ids = batch.input_type, batch.n_id
    features = {(t, "feat"): x for t, x in batch.x.items()}
    features |= {(t, n): rows for t, own in batch.features.items() for n, rows in own.items()}
    layers = to_hetero_mfgs(batch)
    return MiniBatch(
        seeds={kind: ids[kind][: batch.batch_size]},
        labels={kind: batch.y[kind][: batch.batch_size]} if kind in batch.y else None,
        input_nodes=ids,
        sampled_subgraphs=[
            {":".join(r): _subgraph(m, ids[r[0]], ids[r[2]]) for r, m in layer.relations.items()}
            for layer in layers
        ],
        node_features=features,
        edge_features=[
            {
                (":".join(r), name): values
                for r, mfg in own.relations.items()
                for name, values in mfg.edge_features.items()
            }
            for own in layers
        ],
    )


def _subgraph(mfg: Mfg, sources: Tensor, targets: Tensor) -> SampledSubgraph:
    return SampledSubgraph(
        mfg.src, mfg.dst, targets[: mfg.num_dst], sources[: mfg.num_src], mfg.e_id
    )


def _indptr(targets: Tensor, count: int) -> Tensor:
    ends = torch.bincount(targets, minlength=count).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])
