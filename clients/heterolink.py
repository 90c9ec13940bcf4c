"""Batches of seed edges of a store of several node types, as torch tensors."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from clients.connection.session import Session
from clients.dataset import gather_threads
from clients.hetero import HeteroBatch, to_hetero_batch
from clients.heterobatch import HeteroArrays, HeteroReader
from clients.link import EdgeSampledDataset, edge_of_end
from clients.torch import EdgeType
from loaderd.protocol import Attached

__all__ = ["HeteroLinkBatch", "HeteroLinkDataset"]


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


class HeteroLinkDataset(EdgeSampledDataset[HeteroLinkBatch]):
    """Batches of a store of any number of node types and relations."""

    def _make_reader(self, session: Session) -> HeteroReader:
        return HeteroReader(session, self.memory, gather_threads())

    def _to_batch(self, arrays: HeteroArrays, attached: Attached) -> HeteroLinkBatch:
        batch, spec = to_hetero_batch(arrays, attached), attached.resolved.edges
        assert arrays.ends is not None
        assert spec is not None
        values = {f.name: getattr(batch, f.name) for f in fields(batch)}
        if batch.batch is not None:
            edge = edge_of_end(attached, arrays.num_seeds, arrays.ends.size)
            values["batch"] = {name: edge[trees] for name, trees in batch.batch.items()}
        names = ["__".join(relation) for relation in attached.relations]
        edge_type = attached.relations[names.index(spec.relation)]
        found = self.link_fields(attached, torch.from_numpy(arrays.ends), batch)
        return HeteroLinkBatch(**values, edge_type=edge_type, **found)
