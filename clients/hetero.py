"""Batches of several node types as torch tensors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clients.connection.session import Session
from clients.dataset import gather_threads, to_tensor
from clients.heterobatch import HeteroArrays, HeteroReader
from clients.records import TensorRecord
from clients.torch import EdgeType, SampledDataset
from loaderd.protocol import Attached

__all__ = ["HeteroBatch", "HeteroDataset"]


@dataclass(slots=True, repr=False)
class HeteroBatch(TensorRecord):
    """A sampled subgraph in PyG's fields; nodes are local ids within their type.

    Of `input_type`, the first `batch_size` nodes are the seeds.  Every type and every relation of
    the store is there, if with nothing; `x`, `y` and `features` have the types that hold them.
    """

    x: dict[str, Tensor]  # (nodes, ...) features
    y: dict[str, Tensor]  # (nodes, ...) labels; int64 where they are integers
    edge_index: dict[EdgeType, Tensor]  # int64 (2, edges): row 0 source, row 1 target
    n_id: dict[str, Tensor]  # int64 (nodes,) original ids, of each type its own
    e_id: dict[EdgeType, Tensor] | None  # int64 (edges,) original edge ids, where asked for
    input_type: str
    input_id: Tensor  # int64 (batch_size,) places among the input nodes
    batch_size: int
    num_sampled_nodes: dict[str, list[int]]  # among the seeds, then those found by each hop
    num_sampled_edges: dict[EdgeType, list[int]]  # per hop
    epoch: int
    step: int
    features: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # more, by type and name
    frontier: str = "new"  # "layer": hops expand all nodes found so far
    # where edges are sampled up to a time: nodes are not shared between seeds
    batch: dict[str, Tensor] | None = None  # int64 (nodes,) place of the seed in the batch
    seed_time: Tensor | None = None  # int64 (batch_size,)
    # rows of the edges by relation and the name of their array, where asked for
    edge_features: dict[EdgeType, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def num_nodes(self) -> dict[str, int]:
        """Nodes of each type."""
        return {name: ids.numel() for name, ids in self.n_id.items()}


class HeteroDataset(SampledDataset[HeteroBatch]):
    """Batches of a store of any number of node types and relations."""

    def _make_reader(self, session: Session) -> HeteroReader:
        return HeteroReader(session, self.memory, gather_threads())

    def _to_batch(self, arrays: HeteroArrays, attached: Attached) -> HeteroBatch:
        return to_hetero_batch(arrays, attached)


def to_hetero_batch(arrays: HeteroArrays, attached: Attached) -> HeteroBatch:
    """The tensors over `arrays`, which keep them alive: one piece a type, or a relation."""
    nodes, edges = torch.from_numpy(arrays.n_id), torch.from_numpy(arrays.edges)
    node_at, edge_at = arrays.node_starts.tolist(), arrays.edge_starts.tolist()
    e_id = None if arrays.e_id is None else torch.from_numpy(arrays.e_id)
    named: dict[str, dict[str, dict[str, Tensor]]] = {"x": {}, "y": {}, "": {}}
    edge_features: dict[EdgeType, dict[str, Tensor]] = {}
    relation_of = {"__".join(r): r for r in attached.relations}
    for spec in attached.rows:
        if spec.relation:
            name = spec.name.removeprefix(f"{spec.relation}.")
            tensor = to_tensor(arrays.rows[spec.name], spec.dtype, False)
            edge_features.setdefault(relation_of[spec.relation], {})[name] = tensor
            continue
        name = spec.name.removeprefix(f"{spec.node_type}.")
        tensor = to_tensor(arrays.rows[spec.name], spec.dtype, name == "y")
        kind = name if name in ("x", "y") else ""
        named[kind].setdefault(spec.node_type, {})[name] = tensor
    relations = list(enumerate(attached.relations))
    trees = None if arrays.trees is None else torch.from_numpy(arrays.trees)
    return HeteroBatch(
        x={node_type: rows["x"] for node_type, rows in named["x"].items()},
        y={node_type: rows["y"] for node_type, rows in named["y"].items()},
        edge_index={
            r: edges[2 * edge_at[i] : 2 * edge_at[i + 1]].view(2, edge_at[i + 1] - edge_at[i])
            for i, r in relations
        },
        n_id={name: nodes[node_at[i] : node_at[i + 1]] for i, name in enumerate(attached.types)},
        e_id=None if e_id is None else {r: e_id[edge_at[i] : edge_at[i + 1]] for i, r in relations},
        input_type=attached.resolved.seed_type,
        input_id=torch.from_numpy(arrays.input_id),
        batch_size=arrays.num_seeds,
        num_sampled_nodes=dict(zip(attached.types, arrays.nodes_per_hop.tolist(), strict=True)),
        num_sampled_edges=dict(zip(attached.relations, arrays.edges_per_hop.tolist(), strict=True)),
        epoch=arrays.epoch,
        step=arrays.step,
        features=named[""],
        frontier=attached.resolved.frontier,
        batch=None
        if trees is None
        else {name: trees[node_at[i] : node_at[i + 1]] for i, name in enumerate(attached.types)},
        seed_time=None if arrays.times is None else torch.from_numpy(arrays.times),
        edge_features=edge_features,
    )
