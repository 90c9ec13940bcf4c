"""The piece of a batch that one owner computes: what a trainer of plan "split" iterates."""

from dataclasses import dataclass

from torch import Tensor

from clients.records import TensorRecord

__all__ = [
    "Exchange",
    "SplitBatch",
]


@dataclass(slots=True, repr=False)
class Exchange(TensorRecord):
    """Which rows an owner sends to the others for the edges of one hop, and where theirs go."""

    send: Tensor  # int64: own nodes, grouped by receiving owner, each group in that owner's order
    recv: Tensor  # int64: places among the remote nodes of what comes, grouped by sending owner
    send_counts: list[int]  # by owner
    recv_counts: list[int]


@dataclass(slots=True, repr=False)
class SplitBatch(TensorRecord):
    """The nodes of a batch that one owner has, and the edges into them.

    Local ids: own nodes first, the seeds before those that each hop found, in the order of the
    batch; then remote nodes, by the hop that is the first to need them, by owner, and in the order
    in which the hop's edges name them.
    """

    epoch: int
    step: int
    owner: int
    num_owners: int
    batch_size: int  # own seeds; there may be none, and no nodes at all
    step_seeds: int  # seeds of all owners
    n_id: Tensor  # int64 (own nodes,) original ids
    input_id: Tensor  # int64 (batch_size,) places among the input nodes
    edge_index: Tensor  # int64 (2, own edges): sources, and own targets, ascending within a hop
    x: Tensor | None  # (own nodes, ...), or (own and remote nodes, ...) with `mixed_rows`
    y: Tensor | None  # (own nodes, ...)
    features: dict[str, Tensor]  # as x
    num_sampled_nodes: list[int]  # own: the seeds, then those found by each hop
    num_remote_nodes: list[int]  # by hop: those that its edges are the first to need
    num_sampled_edges: list[int]  # own, by hop
    # by hop: frontier "new": what its edges are the first to need; "layer": all that they need
    exchanges: list[Exchange]
    frontier: str
