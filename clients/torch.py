"""Batches as torch tensors: what a training script iterates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.batch import BatchArrays, BatchReader
from clients.connection.request import fanout_fields
from clients.connection.session import Session
from clients.dataset import RECONNECT_S, SteppedDataset, gather_threads, to_tensor
from clients.hopwise.dataset import HopBatch, HopDataset
from clients.prefetch import Prefetcher, prefetch
from clients.records import TensorRecord
from loaderd.errors import Refused
from loaderd.protocol import Attach, Attached, Temporal

__all__ = [
    "Batch",
    "HopBatch",
    "HopDataset",
    "NeighborDataset",
    "Prefetcher",
    "prefetch",
]

InputNodes = Tensor | NDArray[Any] | Sequence[int] | str | None
EdgeType = tuple[str, str, str]  # source type, name, target type
Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
Times = Tensor | NDArray[Any] | Sequence[int]
B_co = TypeVar("B_co", covariant=True)


@dataclass(slots=True, repr=False)
class Batch(TensorRecord):
    """A sampled subgraph in PyG's fields; nodes are local ids, the first `batch_size` the seeds."""

    x: Tensor | None  # (num_nodes, ...) features
    y: Tensor | None  # (num_nodes, ...) labels; int64 where they are integers
    edge_index: Tensor  # int64 (2, num_edges): row 0 source, row 1 target
    n_id: Tensor  # int64 (num_nodes,) original ids
    e_id: Tensor | None  # int64 (num_edges,) original edge ids, where asked for
    input_id: Tensor  # int64 (batch_size,) places among the input nodes
    batch_size: int
    num_sampled_nodes: list[int]  # the seeds, then those found by each hop
    num_sampled_edges: list[int]  # per hop
    epoch: int
    step: int
    features: dict[str, Tensor] = field(default_factory=dict)  # further per-node arrays
    frontier: str = "new"  # "layer": hops expand all nodes found so far
    # where edges are sampled up to a time: nodes are not shared between seeds
    batch: Tensor | None = None  # int64 (num_nodes,) place of its seed in the batch
    seed_time: Tensor | None = None  # int64 (batch_size,)
    # rows of the edges by the name of their array, where asked for
    edge_features: dict[str, Tensor] = field(default_factory=dict)  # (num_edges, ...)

    @property
    def num_nodes(self) -> int:
        """Nodes of the subgraph."""
        return self.n_id.numel()


class SampledDataset(SteppedDataset[B_co]):
    """Neighbor-sampled minibatches from a daemon; epochs and workers as in `SteppedDataset`."""

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        num_neighbors: Fanouts = (15, 10, 5),
        batch_size: int = 1000,
        seed: int = 0,
        plan: str = "auto",
        *,
        input_nodes: InputNodes = None,
        input_type: str = "",
        shuffle: bool = True,
        return_e_id: bool = False,
        edge_features: bool = False,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        hyperbatch: int = 0,
        frontier: str = "new",
        replace: bool = False,
        weighted: bool = False,
        input_time: Times | None = None,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        strict: bool = False,
        macro_partitions: int = 0,
        reuse: int | Literal["while-waiting"] = 1,
        hubs: bool = True,
        halos: bool = True,
        store: str = "",
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """`input_nodes`: ids, a bool mask, or the name of a split ("all": every node), which is
        taken instead of `split`.  `batch_size` counts the seeds of all ranks together.  `plan`,
        `window` (batches under way) and `hyperbatch` (batches built together) change no batch.

        num_neighbors   fanouts from the seeds outward, -1 is all; of a store of several relations
                        for each of them the same, or by (source type, name, target type), for each
                        of them: 0 leaves one out at a hop
        input_type      node type of the seeds, where the store has several

        edge_features   rows of the sampled edges, of all arrays of edges that the store holds

        frontier   "new": a hop expands newly found nodes, as in PyG; "layer": all nodes found so
                   far, drawing anew, as in DGL
        weighted   neighbors are drawn by the weights of the edges; one of weight 0 never is
        input_time    a time of each input node, in their order: edges are sampled up to it (before
                      it, where `strict`), any of them or the `"last"`, and each seed has a subgraph
                      of its own, as in PyG; the store must hold times of edges
        store         name of the daemon's, where it serves several
        reconnect_s   how long it waits for a daemon that went away

        Of plan "macrobatch", on a partitioned store: each epoch deals the partitions out,
        `macro_partitions` at a time (0: an eighth of them), and samples within what is in memory
        of the graph then: these partitions, the store's `hubs`, and the partitions' `halos`.
        `reuse`: passes over the seeds of each, 1 to 4.  These do change batches.  "while-waiting":
        up to 4, and no pass begins once the next macro-batch is there; the length of the dataset is
        the most that an epoch can have then, and batches depend on timing.
        """
        if isinstance(input_nodes, str):
            split, input_nodes = input_nodes, None
        ids = None if input_nodes is None else seed_ids(input_nodes)
        timed = Temporal(temporal_strategy, "given", strict)
        request = Attach(
            token=0,
            request=0,
            store=store,
            plan=plan,
            split=split if ids is None else "",
            temporal=None if input_time is None else timed,
            **fanout_fields(num_neighbors),
            seed_type=input_type,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            return_e_id=return_e_id,
            edge_features=edge_features,
            rank=rank,
            world_size=world_size,
            window=window,
            hyperbatch=hyperbatch,
            frontier=frontier,
            replace=replace,
            weighted=weighted,
            macro_partitions=macro_partitions,
            reuse=4 if reuse == "while-waiting" else reuse,
            waiting=reuse == "while-waiting",
            hubs=hubs,
            halos=halos,
            mask_size=0 if input_nodes is None else mask_size(input_nodes),
        )
        super().__init__(endpoint, request, timed_ids(ids, input_time), reconnect_s)


class NeighborDataset(SampledDataset[Batch]):
    """Batches of a store of one node type and one relation."""

    def _make_reader(self, session: Session) -> BatchReader:
        relations = len(session.attached.relations)
        if relations != 1 or len(session.attached.types) != 1:
            raise Refused(
                f"{self.endpoint}: the store has {relations} relations, a NeighborDataset delivers "
                "stores of one; take clients.hetero.HeteroDataset"
            )
        return BatchReader(session, self.memory, gather_threads())

    def _to_batch(self, arrays: BatchArrays, attached: Attached) -> Batch:
        return to_batch(arrays, attached)


def seed_ids(nodes: Tensor | NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """Ids as an int64 array of their own, from ids or from a bool mask over all nodes."""
    array = nodes.detach().cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
    if array.ndim == 1 and not array.size:
        raise Refused("input_nodes: found none, expected at least one id")
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise Refused(f"input_nodes: {array.dtype} {array.shape}, expected 1-d ids or a bool mask")
    return np.flatnonzero(array) if array.dtype.kind == "b" else array.astype(np.int64)


def mask_size(nodes: Tensor | NDArray[Any] | Sequence[int]) -> int:
    """Nodes that a bool mask is over; 0 of ids."""
    array = nodes.detach().cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
    return array.size if array.dtype.kind == "b" else 0


def timed_ids(ids: NDArray[np.int64] | None, times: Times | None) -> NDArray[np.int64] | None:
    """What follows a request: ids, and times behind them, where there are any.  Raises Refused."""
    if times is None:
        return ids
    array = times.detach().cpu().numpy() if isinstance(times, Tensor) else np.asarray(times)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Refused(f"times: {array.dtype} {array.shape}, expected integers, one for each seed")
    if array.size and int(array.min()) == np.iinfo(np.int64).min:
        raise Refused("times: -2^63 is none, expected later ones")
    return np.concatenate([np.empty(0, np.int64) if ids is None else ids, array.astype(np.int64)])


def to_batch(arrays: BatchArrays, attached: Attached) -> Batch:
    """The tensors over `arrays`, which keep them alive."""
    rows = {
        spec.name: to_tensor(arrays.rows[spec.name], spec.dtype, spec.name == "y")
        for spec in attached.rows
    }
    named = {s.name: s.name.removeprefix(f"{s.relation}.") for s in attached.rows if s.relation}
    edge_features = {name: rows.pop(full) for full, name in named.items()}
    return Batch(
        x=rows.pop("x", None),
        y=rows.pop("y", None),
        edge_index=torch.from_numpy(arrays.edge_index),
        n_id=torch.from_numpy(arrays.n_id),
        e_id=None if arrays.e_id is None else torch.from_numpy(arrays.e_id),
        input_id=torch.from_numpy(arrays.input_id),
        batch_size=arrays.num_seeds,
        num_sampled_nodes=list(arrays.nodes_per_hop),
        num_sampled_edges=list(arrays.edges_per_hop),
        epoch=arrays.epoch,
        step=arrays.step,
        features=rows,
        batch=None if arrays.trees is None else torch.from_numpy(arrays.trees),
        seed_time=None if arrays.times is None else torch.from_numpy(arrays.times),
        frontier=attached.resolved.frontier,
        edge_features=edge_features,
    )
