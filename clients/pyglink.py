"""`LinkNeighborLoader` as PyG has it, over a daemon: one changed line in a training script."""

from typing import Any, Literal

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

from clients.dataset import RECONNECT_S
from clients.heterolink import HeteroLinkBatch, HeteroLinkDataset
from clients.link import Exclude, LinkBatch, LinkDataset
from clients.pyg import (
    DaemonLoader,
    Transform,
    check_endpoint,
    data_loader_options,
    to_data,
    to_hetero_data,
)
from clients.torch import EdgeType, Fanouts, Times

Edges = Tensor | str | None


class LinkNeighborLoader(DaemonLoader):
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `LinkNeighborLoader`.

    The first argument is the endpoint of a daemon where PyG has the data:

        LinkNeighborLoader("ipc:///run/graph.sock", [10, 10], train_edges, neg_sampling_ratio=1.0)

    Where edges are given with their type, (edge type, edges), it yields `HeteroData`.  Each
    iteration is the next epoch, with workers or without; `set_epoch` chooses.  As with PyG's, seed
    edges stay in the sampled neighborhoods unless `exclude` says otherwise.
    """

    dataset: LinkDataset | HeteroLinkDataset

    def __init__(
        self,
        data: str,
        num_neighbors: Fanouts,
        edge_label_index: Edges | tuple[EdgeType, Edges] = None,
        edge_label: Tensor | None = None,
        edge_label_time: Times | Literal["own"] | None = None,
        *,
        replace: bool = False,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        transform: Transform | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        exclude: Exclude = "none",
        seed: int = 0,
        plan: str = "auto",
        return_e_id: bool = False,
        edge_features: bool = False,
        weighted: bool = False,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        store: str = "",
        reconnect_s: float = RECONNECT_S,
        **options: Any,
    ) -> None:
        """`edge_label_index`: (2, edges) original ids, the name of a split of edges, or all edges
        where it is None; or (edge type, one of these).  `edge_label_time`: of each edge, up to
        which edges are sampled, by their times in the store, whatever `time_attr` was called there;
        "own": before those of the seed edges in the store.  `options` are those of
        `torch.utils.data.DataLoader`."""
        check_endpoint(data)
        if time_attr is not None and edge_label_time is None:
            raise TypeError("time_attr without edge_label_time, expected a time of each edge")
        edge_type, edges = _typed(edge_label_index)
        negatives = _negatives(neg_sampling, neg_sampling_ratio)
        make = LinkDataset if edge_type is None else HeteroLinkDataset
        dataset = make(
            data,
            "all" if edges is None else edges,
            num_neighbors,
            batch_size,
            seed,
            plan,
            edge_label=edge_label,
            relation=edge_type,
            negatives="none" if negatives is None else negatives.mode.value,
            amount=0.0 if negatives is None else negatives.amount,
            exclude=exclude,
            shuffle=shuffle,
            return_e_id=return_e_id,
            edge_features=edge_features,
            rank=rank,
            world_size=world_size,
            window=window,
            replace=replace,
            weighted=weighted,
            edge_label_time=edge_label_time,
            temporal_strategy=temporal_strategy,
            store=store,
            reconnect_s=reconnect_s,
        )
        collate: Any = Collate(transform)  # of one batch, not of a list: there is no batch_size
        kept = data_loader_options("LinkNeighborLoader", options)
        super().__init__(dataset, batch_size=None, collate_fn=collate, **kept)


def _typed(edges: Any) -> tuple[EdgeType | None, Any]:
    """The edges' type, where it is given, and the edges."""
    if isinstance(edges, tuple) and len(edges) == 2 and isinstance(edges[0], tuple):
        return edges
    return None, edges


def _negatives(
    sampling: NegativeSampling | str | dict[str, Any] | None, ratio: float | None
) -> NegativeSampling | None:
    """As PyG reads the two; raises ValueError."""
    if ratio:
        sampling = NegativeSampling("binary", ratio)
    found: NegativeSampling | None = NegativeSampling.cast(sampling)
    if found is not None and (found.src_weight is not None or found.dst_weight is not None):
        raise ValueError("neg_sampling has weights, expected none: negatives are drawn uniformly")
    return found


class Collate:
    """Turns each batch into PyG's record, in the process that read it; pickles for spawn."""

    def __init__(self, transform: Transform | None) -> None:
        self._transform = transform

    def __call__(self, batch: LinkBatch | HeteroLinkBatch) -> Any:
        if isinstance(batch, HeteroLinkBatch):
            data: Any = to_hetero_link_data(batch)
        else:
            data = to_link_data(batch)
        return data if self._transform is None else self._transform(data)


def to_link_data(batch: LinkBatch) -> Data:
    """The same tensors as PyG's record; nothing is copied."""
    data = to_data(batch)
    del data.batch_size  # PyG's has none: its batches count edges
    if batch.src_index is None:
        data.edge_label_index, data.edge_label = batch.edge_label_index, batch.edge_label
        data.edge_label_time = batch.edge_label_time
        if "seed_time" in data:
            del data.seed_time
    else:
        data.src_index, data.dst_pos_index = batch.src_index, batch.dst_pos_index
        data.dst_neg_index, data.seed_time = batch.dst_neg_index, batch.seed_time
    return data


def to_hetero_link_data(batch: HeteroLinkBatch) -> HeteroData:
    """The same of several types: what belongs to the seed edges stands with their edge type."""
    data, (src, _, dst) = to_hetero_data(batch), batch.edge_type
    data[batch.edge_type].input_id = batch.input_id
    if batch.src_index is None:
        data[batch.edge_type].edge_label_index = batch.edge_label_index
        data[batch.edge_type].edge_label = batch.edge_label
        data[batch.edge_type].edge_label_time = batch.edge_label_time
    else:
        data[src].src_index, data[dst].dst_pos_index = batch.src_index, batch.dst_pos_index
        data[dst].dst_neg_index = batch.dst_neg_index
        data[src].seed_time = data[dst].seed_time = batch.seed_time
    return data
