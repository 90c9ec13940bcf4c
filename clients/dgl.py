"""DGL's data loader over a daemon: DGL's blocks if asked for, else plain tensors.

    DataLoader("ipc:///run/graph.sock", fanouts=[10, 15], indices="train", batch_size=1000)

yields (input_nodes, output_nodes, blocks).  Fanouts are DGL's: the layer next to the input first;
ours and PyG's `num_neighbors` run the other way round.  Hops expand all nodes found so far, drawing
again in each layer, as DGL's `NeighborSampler` does.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from clients.mfg import HeteroMfg, layer_fanouts, to_hetero_mfgs
from clients.torch import Batch, HeteroBatch, HeteroDataset, InputNodes, NeighborDataset, by_type
from loaderd.api.errors import Refused

__all__ = [
    "DataLoader",
    "Sample",
    "to_blocks",
    "to_sample",
]


class Sample(NamedTuple):
    """One step of the loader; dicts by type if the store has several."""

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
        return len(self.dataset)

    def __iter__(self) -> Iterator[Sample]:
        for batch in self.dataset:
            yield to_sample(batch, self._dgl)


def import_dgl() -> Any:
    """Import DGL.  Raises Refused: it is not installed, or not built for this torch."""
    try:
        return importlib.import_module("dgl")
    except (ImportError, OSError) as error:  # a build for another torch misses a library
        reason = " ".join(str(error).split())
        raise Refused(
            f"dgl: cannot be imported ({reason}); take plain tensors, or install DGL for this torch"
        ) from error


def to_sample(batch: Batch | HeteroBatch, dgl: Any = None) -> Sample:
    """A batch in the form of DGL's loader; `dgl`: the package, to build blocks of its own."""
    typed = by_type(batch)
    kind, layers = typed.input_type, to_hetero_mfgs(typed)
    seeds: Any = typed.n_id[kind][: batch.batch_size]
    if isinstance(batch, HeteroBatch):
        return Sample(
            batch.n_id, {kind: seeds}, layers if dgl is None else to_blocks(layers, batch, dgl)
        )
    plain = [next(iter(layer.relations.values())) for layer in layers]
    return Sample(batch.n_id, seeds, plain if dgl is None else to_blocks(layers, batch, dgl))


def to_blocks(layers: Sequence[HeteroMfg], batch: Batch | HeteroBatch, dgl: Any) -> list[Any]:
    """DGL's blocks: "feat" of the first one's sources, "label" of the last one's targets."""
    typed, several = by_type(batch), isinstance(batch, HeteroBatch)
    blocks = []
    for layer in layers:
        edges: Any = {r: (m.src, m.dst) for r, m in layer.relations.items()}
        sizes: list[Any] = [layer.num_src, layer.num_dst]
        if not several:  # DGL names the only type and relation itself
            edges, *sizes = (next(iter(given.values())) for given in (edges, *sizes))
        block = dgl.create_block(edges, *sizes)
        for r, m in layer.relations.items():
            data = block.edges[r].data if several else block.edata
            if m.e_id is not None:
                data[dgl.EID] = m.e_id
            for name, values in m.edge_features.items():
                data[name] = values
        blocks.append(block)
    for name, ids in typed.n_id.items():
        data = blocks[0].srcnodes[name].data if several else blocks[0].srcdata
        data[dgl.NID] = ids
        if name in typed.x:
            data["feat"] = typed.x[name]
    kind = typed.input_type
    if kind in typed.y:
        data = blocks[-1].dstnodes[kind].data if several else blocks[-1].dstdata
        data["label"] = typed.y[kind][: batch.batch_size]
    return blocks
