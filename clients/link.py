"""Batches of seed edges, for link prediction, as torch tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.batch import BatchArrays, BatchReader
from clients.connection.request import fanout_fields, relation_name
from clients.connection.session import Session
from clients.dataset import RECONNECT_S, SteppedDataset, gather_threads
from clients.torch import Batch, EdgeType, Fanouts, Times, timed_ids, to_batch
from loaderd.errors import Refused
from loaderd.protocol import Attach, Attached, SeedEdges, Temporal

__all__ = ["LinkBatch", "LinkDataset"]

SeedEdgesOf = Tensor | NDArray[Any] | Sequence[Sequence[int]] | str
Negatives = Literal["none", "binary", "triplet"]
B_co = TypeVar("B_co", covariant=True)
Exclude = Literal["none", "self", "reverse"]


@dataclass(slots=True, repr=False)
class LinkBatch(Batch):
    """A subgraph around seed edges, in PyG's fields; `batch_size` counts the edges.

    The first `num_sampled_nodes[0]` nodes are the different ends of the edges and negatives; where
    edges are sampled up to a time all ends, each with a subgraph of its own, and `batch` is the
    place of a node's seed edge in the batch.
    """

    edge_label_index: Tensor | None = None  # int64 (2, edges + negatives): local ids of the ends
    edge_label: Tensor | None = None  # (edges + negatives,): of negatives 0
    src_index: Tensor | None = None  # of triplets: int64 (edges,) local ids of the sources
    dst_pos_index: Tensor | None = None  # int64 (edges,) of their targets
    dst_neg_index: Tensor | None = None  # int64 (edges,), or (edges, amount): of negative targets
    edge_label_time: Tensor | None = None  # int64 (edges + negatives,): these have their edge's


class EdgeSampledDataset(SteppedDataset[B_co]):
    """Neighbor-sampled subgraphs around seed edges; epochs and workers as in `SteppedDataset`."""

    def __init__(
        self,
        endpoint: str,
        edges: SeedEdgesOf = "all",
        num_neighbors: Fanouts = (15, 10),
        batch_size: int = 1000,
        seed: int = 0,
        plan: str = "auto",
        *,
        edge_label: Tensor | None = None,
        relation: EdgeType | None = None,
        negatives: Negatives = "binary",
        amount: float = 1.0,
        exclude: Exclude | None = None,
        reverse: EdgeType | None = None,
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
        edge_label_time: Times | Literal["own"] | None = None,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        strict: bool | None = None,
        store: str = "",
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """`edges`: "all" of the relation, the name of a split of them, or their ends, (2, edges)
        original ids.  `batch_size` counts the edges of all ranks together.

        edge_label  (edges,) a label of each; where "all" are seeds, by edge id.  With binary
                    negatives, whose label is 0, labels that begin at 0 are counted up by one
        relation    of the edges, where the store has several
        negatives   "binary": `amount` random pairs for each edge; "triplet": so many random targets
        exclude     taken out of the sampled edges: "self": the batch's seed edges; "reverse": also
                    those that lead back, in `reverse` where the relation joins two types (the
                    store knows it where ingest added it, or where there is only one), which is
                    the default; "none": nothing, as where edges are sampled up to a time
        edge_label_time   a time of each edge, or "own": of all edges those in the store.  Edges are
                    sampled up to it (before it, where `strict`, as is the default with "own"), any
                    of them or the "last"; ends are not shared between edges, as in PyG

        The rest is as in `NeighborDataset`; seed edges are served by plans "minibatch" and
        "hyperbatch".
        """
        ids = None if isinstance(edges, str) else edge_ids(edges)
        self._labels = counted_labels(edge_label, negatives, ids)
        frame = ids if isinstance(edge_label_time, str) else timed_ids(ids, edge_label_time)
        temporal = up_to(edge_label_time, temporal_strategy, strict)
        request = Attach(
            token=0,
            request=0,
            store=store,
            plan=plan,
            split=edges if isinstance(edges, str) else "",
            **fanout_fields(num_neighbors),
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
            temporal=temporal,
            edges=SeedEdges(
                relation_name(relation) if relation else "",
                negatives,
                0.0 if negatives == "none" else float(amount),
                exclude or ("none" if temporal else "reverse"),
                relation_name(reverse) if reverse else "",
            ),
        )
        super().__init__(endpoint, request, frame, reconnect_s)

    def link_fields(self, attached: Attached, ends: Tensor, batch: Any) -> dict[str, Any]:
        """PyG's fields of a batch: `ends` and `batch` are what was read of it."""
        spec = attached.resolved.edges
        assert spec is not None
        return link_fields(ends, batch.input_id, spec, self._labels, batch.seed_time)


class LinkDataset(EdgeSampledDataset[LinkBatch]):
    """Batches of a store of one node type and one relation."""

    def _make_reader(self, session: Session) -> BatchReader:
        relations = len(session.attached.relations)
        if relations != 1 or len(session.attached.types) != 1:
            raise Refused(
                f"{self.endpoint}: the store has {relations} relations, a LinkDataset delivers "
                "stores of one; take clients.heterolink.HeteroLinkDataset"
            )
        return BatchReader(session, self.memory, gather_threads())

    def _to_batch(self, arrays: BatchArrays, attached: Attached) -> LinkBatch:
        batch = to_batch(arrays, attached)
        assert arrays.ends is not None
        values = {f.name: getattr(batch, f.name) for f in fields(batch)}
        if batch.batch is not None:
            values["batch"] = edge_of_end(attached, arrays.num_seeds, arrays.ends.size)[batch.batch]
        ends = torch.from_numpy(arrays.ends)
        return LinkBatch(**values, **self.link_fields(attached, ends, batch))


def edge_of_end(attached: Attached, num: int, num_ends: int) -> Tensor:
    """Place of the edge in the batch that each end belongs to, or whose negative it belongs to."""
    spec = attached.resolved.edges
    assert spec is not None
    sizes = [num, num, num_ends - 2 * num] if spec.negatives == "triplet" else [num_ends // 2] * 2
    return torch.cat([torch.arange(size) % num for size in sizes])


def counted_labels(
    labels: Tensor | None, negatives: Negatives, ids: NDArray[np.int64] | None
) -> Tensor | None:
    """Labels of seed edges, beside negatives whose label is 0.  Raises Refused."""
    if labels is None:
        return None
    if negatives == "triplet":
        raise Refused("edge_label: triplets tell edges from negatives, expected none with them")
    if ids is not None and labels.shape[0] != ids.size // 2:
        raise Refused(
            f"edge_label: {labels.shape[0]} labels for {ids.size // 2} edges, expected as many"
        )
    from_zero = negatives == "binary" and labels.numel() and labels.min() == 0
    return labels + 1 if from_zero else labels


def up_to(
    times: Times | Literal["own"] | None,
    strategy: Literal["uniform", "last"],
    strict: bool | None,
) -> Temporal | None:
    """Up to which times edges are sampled.  Raises Refused: a word that is not "own"."""
    if times is None:
        return None
    own = isinstance(times, str)
    if own and times != "own":
        raise Refused(f"edge_label_time is {times!r}, expected 'own' or times")
    return Temporal(strategy, "edges" if own else "given", own if strict is None else strict)


def edge_ids(edges: Tensor | NDArray[Any] | Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """All sources, then all targets, int64, of edges given as (2, edges).  Raises Refused."""
    array = edges.detach().cpu().numpy() if isinstance(edges, Tensor) else np.asarray(edges)
    if array.ndim != 2 or array.shape[0] != 2 or array.dtype.kind not in "iu":
        raise Refused(f"edges: {array.dtype} {array.shape}, expected integers (2, edges)")
    return array.astype(np.int64).reshape(-1)


def link_fields(
    ends: Tensor,
    input_id: Tensor,
    spec: SeedEdges,
    labels: Tensor | None,
    times: Tensor | None = None,
) -> dict[str, Any]:
    """PyG's fields of a batch of seed edges.

    ends      local ids: all sources, then all targets; of triplets then negative targets
    labels    of the edges, by `input_id`
    times     of the batch's edges, where edges are sampled up to a time
    """
    num = input_id.numel()
    if spec.negatives == "triplet":
        negative = ends[2 * num :].view(-1, num).t()
        return {
            "src_index": ends[:num],
            "dst_pos_index": ends[num : 2 * num],
            "dst_neg_index": negative.squeeze(-1).contiguous(),
        }
    index = ends.view(2, -1)
    own = labels[input_id] if labels is not None else None
    if spec.negatives == "binary":
        own = torch.ones(num) if own is None else own
        own = torch.cat([own, own.new_zeros(index.shape[1] - num, *own.shape[1:])])
    timed = None if times is None else times[torch.arange(index.shape[1]) % num]
    return {"edge_label_index": index, "edge_label": own, "edge_label_time": timed}
