"""DGL's data loader over a daemon: its blocks where DGL is installed, else plain tensors.

    DataLoader("ipc:///run/graph.sock", fanouts=[10, 15], indices="train", batch_size=1000)

yields (input_nodes, output_nodes, blocks).  Fanouts are DGL's: the layer next to the input first;
ours and PyG's `num_neighbors` run the other way round.  Hops expand all nodes found so far, drawing
anew in each layer, as DGL's `NeighborSampler` does.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from clients.hetero import HeteroBatch, HeteroDataset
from clients.mfg import HeteroMfg, Mfg, layer_fanouts, to_hetero_mfgs, to_mfgs
from clients.torch import Batch, InputNodes, NeighborDataset
from loaderd.errors import Refused


class Sample(NamedTuple):
    """What a step yields; dicts by type where the store has several."""

    input_nodes: Tensor | dict[str, Tensor]  # original ids
    output_nodes: Tensor | dict[str, Tensor]
    blocks: list[Any]  # DGL's, or `Mfg` and `HeteroMfg`


class DataLoader:
    """Batches of a daemon, each as DGL's `DataLoader` gives it; epochs as in `SteppedDataset`."""

    def __init__(
        self,
        endpoint: str,
        fanouts: Sequence[int],
        indices: InputNodes = "train",
        batch_size: int = 1000,
        *,
        input_type: str = "",
        as_dgl: bool = False,
        **options: Any,
    ) -> None:
        """`indices`: as `input_nodes` of a `NeighborDataset`, which takes `options`, too.

        as_dgl   blocks are DGL's own, with features and labels in `srcdata` and `dstdata`

        Raises Refused: DGL cannot be imported.
        """
        self._dgl = import_dgl() if as_dgl else None
        make = HeteroDataset if input_type else NeighborDataset
        self.dataset: Any = make(
            endpoint, num_neighbors=layer_fanouts(fanouts), input_nodes=indices,
            batch_size=batch_size, frontier="layer", input_type=input_type, **options,
        )  # fmt: skip

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Sample]:
        """The next epoch."""
        for batch in self.dataset:
            yield to_sample(batch, self._dgl)


def import_dgl() -> Any:
    """The package.  Raises Refused: it is not there, or not for this torch."""
    try:
        return importlib.import_module("dgl")
    except (ImportError, OSError) as error:  # a build for another torch misses a library
        reason = " ".join(str(error).split())
        raise Refused(
            f"dgl: cannot be imported ({reason}); take plain tensors, or install DGL for this torch"
        ) from error


def to_sample(batch: Batch | HeteroBatch, dgl: Any = None) -> Sample:
    """A batch as DGL gives it; `dgl`: the package, where blocks are to be its own."""
    if isinstance(batch, HeteroBatch):
        kind = batch.input_type
        layers: list[Any] = list(to_hetero_mfgs(batch))
        seeds: Any = {kind: batch.n_id[kind][: batch.batch_size]}
    else:
        layers = list(to_mfgs(batch))
        seeds = batch.n_id[: batch.batch_size]
    return Sample(batch.n_id, seeds, layers if dgl is None else to_blocks(layers, batch, dgl))


def to_blocks(layers: Sequence[Mfg | HeteroMfg], batch: Batch | HeteroBatch, dgl: Any) -> list[Any]:
    """DGL's blocks: "feat" of the first one's sources, "label" of the last one's targets."""
    blocks = []
    for layer in layers:
        if isinstance(layer, HeteroMfg):
            edges = {r: (m.src, m.dst) for r, m in layer.relations.items()}
            block = dgl.create_block(edges, layer.num_src, layer.num_dst)
            for r, m in layer.relations.items():
                if m.e_id is not None:
                    block.edges[r].data[dgl.EID] = m.e_id
                for name, values in m.edge_features.items():
                    block.edges[r].data[name] = values
        else:
            block = dgl.create_block((layer.src, layer.dst), layer.num_src, layer.num_dst)
            if layer.e_id is not None:
                block.edata[dgl.EID] = layer.e_id
            for name, values in layer.edge_features.items():
                block.edata[name] = values
        blocks.append(block)
    if isinstance(batch, HeteroBatch):
        for name, ids in batch.n_id.items():
            blocks[0].srcnodes[name].data[dgl.NID] = ids
        for name, x in batch.x.items():
            blocks[0].srcnodes[name].data["feat"] = x
        kind = batch.input_type
        if kind in batch.y:
            blocks[-1].dstnodes[kind].data["label"] = batch.y[kind][: batch.batch_size]
        return blocks
    blocks[0].srcdata[dgl.NID] = batch.n_id
    if batch.x is not None:
        blocks[0].srcdata["feat"] = batch.x
    if batch.y is not None:
        blocks[-1].dstdata["label"] = batch.y[: batch.batch_size]
    return blocks
