"""`NeighborLoader` as PyG has it, over a daemon: one changed line in a training script."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch_geometric.data import Data

from clients.torch import Batch, InputNodes, NeighborDataset


class NeighborLoader:
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `NeighborLoader`.

    The first argument is the endpoint of a daemon where PyG has the data:

        NeighborLoader("ipc:///run/graph.sock", num_neighbors=[15, 10], input_nodes="train")
    """

    def __init__(
        self,
        endpoint: str,
        num_neighbors: Sequence[int],
        input_nodes: InputNodes = "all",
        batch_size: int = 1,
        shuffle: bool = False,
        **options: Any,
    ) -> None:
        """`options` are those of `clients.torch.NeighborDataset`: seed, return_e_id, rank, ..."""
        self.dataset = NeighborDataset(
            endpoint,
            num_neighbors=num_neighbors,
            input_nodes=input_nodes,
            batch_size=batch_size,
            shuffle=shuffle,
            **options,
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Data]:
        """An epoch; each iteration is the next one, unless `set_epoch` chose."""
        return (to_data(batch) for batch in self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self.dataset.set_epoch(epoch)


def to_data(batch: Batch) -> Data:
    """The same tensors as PyG's record; nothing is copied."""
    data = Data(
        x=batch.x,
        edge_index=batch.edge_index,
        y=batch.y,
        n_id=batch.n_id,
        input_id=batch.input_id,
        batch_size=batch.batch_size,
        num_sampled_nodes=batch.num_sampled_nodes,
        num_sampled_edges=batch.num_sampled_edges,
        **batch.features,
    )
    data.num_nodes = batch.num_nodes
    if batch.e_id is not None:
        data.e_id = batch.e_id
    return data
