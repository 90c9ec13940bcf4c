"""Batches of seed edges, for link prediction, as torch tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.connection.request import fanout_fields, relation_name
from clients.torch import (
    Batch,
    EdgeType,
    Fanouts,
    HeteroBatch,
    SampledDataset,
    SamplingOptions,
    Times,
    host_array,
    sampling_request,
    timed_ids,
)
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attached, SeedEdges

SeedEdgesOf = Tensor | NDArray[Any] | Sequence[Sequence[int]] | str
Negatives = Literal["none", "binary", "triplet"]
B_co = TypeVar("B_co", covariant=True)
Exclude = Literal["none", "self", "reverse"]


@dataclass(slots=True, repr=False)
class LinkBatch(Batch):
    """A subgraph around seed edges, in PyG's fields; `batch_size` counts the edges.

    The first `num_sampled_nodes[0]` nodes are the distinct ends of the edges and negatives.  If
    edges are sampled up to a time, they are all ends, each with a subgraph of its own, and `batch`
    is the place of a node's seed edge in the batch.
    """

    edge_label_index: Tensor | None = None  # int64 (2, edges + negatives): local ids of the ends
    edge_label: Tensor | None = None  # (edges + negatives,): 0 for negatives
    src_index: Tensor | None = None  # of triplets: int64 (edges,) local ids of the sources
    dst_pos_index: Tensor | None = None  # int64 (edges,) of their targets
    dst_neg_index: Tensor | None = None  # int64 (edges,), or (edges, amount): negative targets
    edge_label_time: Tensor | None = None  # int64 (edges + negatives,): a negative has its edge's


@dataclass(slots=True, repr=False)
class HeteroLinkBatch(HeteroBatch):
    """A subgraph around seed edges of `edge_type`, in PyG's fields; `batch_size` counts the edges.

    Local ids of sources and targets are within their types; else as in `LinkBatch`.
    """

    edge_type: EdgeType = ("", "", "")
    edge_label_index: Tensor | None = None
    edge_label: Tensor | None = None
    src_index: Tensor | None = None
    dst_pos_index: Tensor | None = None
    dst_neg_index: Tensor | None = None
    edge_label_time: Tensor | None = None


class LinkOptions(SamplingOptions, total=False):
    """Options of datasets whose seeds are edges, in addition to `SamplingOptions`.

    edge_label        (edges,) a label for each; by edge id if "all" are seeds.  With binary
                      negatives, whose label is 0, labels that begin at 0 are increased by one
    relation          of the edges, if the store has several
    negatives         "binary" (default): `amount` random pairs for each edge; "triplet": `amount`
                      random targets for each edge; "none"
    amount            1.0 by default
    exclude           edges removed from the sample: "self": the batch's seed edges; "reverse" (the
                      default): also their reverses, in relation `reverse` if two types are joined
                      (the store knows it if ingest added it, or if there is only one); "none": no
                      edges, the default if edges are sampled up to a time
    edge_label_time   a time for each edge, or "own": the store's times of the edges.  Edges are
                      sampled up to it (before it, if `strict`, which is the default with "own");
                      ends are not shared between edges, as in PyG
    """

    edge_label: Tensor | None
    relation: EdgeType | None
    negatives: Negatives
    amount: float
    exclude: Exclude | None
    reverse: EdgeType | None
    edge_label_time: Times | Literal["own"] | None


class EdgeSampledDataset(SampledDataset[B_co]):
    """Neighbor-sampled subgraphs around seed edges; epochs and workers as in `SteppedDataset`."""

    def __init__(
        self,
        endpoint: str,
        edges: SeedEdgesOf = "all",
        num_neighbors: Fanouts = (15, 10),
        batch_size: int = 1000,
        **options: Unpack[LinkOptions],
    ) -> None:
        """`edges`: "all" edges of the relation, the name of a split of them, or (2, edges) original
        ids of their ends.  `batch_size` counts the edges of all ranks together.

        `num_neighbors` as in `NeighborDataset`; seed edges are served by plans "minibatch" and
        "hyperbatch".
        """
        ids = None if isinstance(edges, str) else edge_ids(edges)
        negatives, label_time = options.get("negatives", "binary"), options.get("edge_label_time")
        self._labels = counted_labels(options.get("edge_label"), negatives, ids)
        times = "" if label_time is None else "given"
        if isinstance(label_time, str):
            if label_time != "own":
                raise Refused(f"edge_label_time is {label_time!r}, expected 'own' or times")
            times, label_time = "edges", None
        relation, reverse = options.get("relation"), options.get("reverse")
        seeds = SeedEdges(
            relation_name(relation) if relation else "",
            negatives,
            0.0 if negatives == "none" else float(options.get("amount", 1.0)),
            options.get("exclude") or ("none" if times else "reverse"),
            relation_name(reverse) if reverse else "",
        )
        request = sampling_request(
            options,
            times,
            LinkOptions,
            split=edges if isinstance(edges, str) else "",
            batch_size=batch_size,
            edges=seeds,
            **fanout_fields(num_neighbors),
        )
        numbers = timed_ids(ids, label_time)
        super().__init__(endpoint, request, numbers, options.get("reconnect_s"))

    def _fields(self, found: dict[str, Any], attached: Attached) -> dict[str, Any]:
        spec, ends = attached.resolved.edges, found.pop("ends")
        assert spec is not None
        if found["batch"] is not None:
            edge = edge_of_end(spec, found["batch_size"], ends.numel())
            found["batch"] = {name: edge[trees] for name, trees in found["batch"].items()}
        names = ["__".join(relation) for relation in attached.relations]
        found["edge_type"] = attached.relations[names.index(spec.relation)]
        own = link_fields(ends, found["input_id"], spec, self._labels, found["seed_time"])
        return found | own


class LinkDataset(EdgeSampledDataset[LinkBatch]):
    """Batches of a store of one node type and one relation."""

    batch_type, several_types = LinkBatch, "clients.link.HeteroLinkDataset"


class HeteroLinkDataset(EdgeSampledDataset[HeteroLinkBatch]):
    """Batches of a store of any number of node types and relations."""

    batch_type = HeteroLinkBatch


def edge_of_end(spec: SeedEdges, num: int, num_ends: int) -> Tensor:
    """For each end, the place in the batch of its edge, or of the edge that its negative is for."""
    sizes = [num, num, num_ends - 2 * num] if spec.negatives == "triplet" else [num_ends // 2] * 2
    return torch.cat([torch.arange(size) % num for size in sizes])


def counted_labels(
    labels: Tensor | None, negatives: Negatives, ids: NDArray[np.int64] | None
) -> Tensor | None:
    """Labels of seed edges, increased if negatives have label 0, too.  Raises Refused."""
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


def edge_ids(edges: Tensor | NDArray[Any] | Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Flatten (2, edges) to int64: all sources, then all targets.  Raises Refused."""
    array = host_array(edges)
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

    ends      local ids: all sources, then all targets; for triplets then negative targets
    labels    of the edges, by `input_id`
    times     of the batch's edges, if edges are sampled up to a time
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
