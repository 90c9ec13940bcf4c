"""`NeighborLoader` as PyG has it, over a daemon: one changed line in a training script."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader
from torch_geometric.data import Data

from clients.dataset import RECONNECT_S
from clients.torch import Batch, InputNodes, NeighborDataset


class NeighborLoader(DataLoader[Any]):
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `NeighborLoader`.

    The first argument is the endpoint of a daemon where PyG has the data:

        NeighborLoader("ipc:///run/graph.sock", num_neighbors=[15, 10], input_nodes="train")

    Each iteration is the next epoch, with workers or without; `set_epoch` chooses.
    """

    dataset: NeighborDataset

    def __init__(
        self,
        data: str,
        num_neighbors: Sequence[int],
        input_nodes: InputNodes = None,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        transform: Callable[[Data], Data] | None = None,
        seed: int = 0,
        plan: str = "auto",
        return_e_id: bool = False,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        reconnect_s: float = RECONNECT_S,
        **options: Any,
    ) -> None:
        """`input_nodes`: ids, a bool mask, the name of a split, or all nodes where it is None.
        `options` are those of `torch.utils.data.DataLoader`: num_workers, pin_memory, ..."""
        if not isinstance(data, str):
            raise TypeError(
                f"data: {type(data).__name__}, expected a daemon's endpoint, ipc:///..."
            )
        dataset = NeighborDataset(
            data,
            num_neighbors=num_neighbors,
            batch_size=batch_size,
            seed=seed,
            plan=plan,
            input_nodes="all" if input_nodes is None else input_nodes,
            shuffle=shuffle,
            return_e_id=return_e_id,
            rank=rank,
            world_size=world_size,
            window=window,
            reconnect_s=reconnect_s,
        )
        collate: Any = _Collate(transform)  # of one batch, not of a list: there is no batch_size
        super().__init__(dataset, batch_size=None, collate_fn=collate, **options)

    def __iter__(self) -> Iterator[Data]:  # type: ignore[override]
        """An epoch; each iteration is the next one, unless `set_epoch` chose."""
        batches = super().__iter__()
        if self.num_workers:  # they took the dataset's position along, and count on their own
            self.dataset.skip_epoch()
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self.dataset.set_epoch(epoch)

    def state_dict(self, batch: Data | None = None) -> dict[str, Any]:
        """What to save to go on after `batch`; with workers it must be given."""
        return self.dataset.state_dict(batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, at the next iteration, after the last batch that `state` counts as consumed."""
        self.dataset.load_state_dict(state)


class _Collate:
    """Turns each batch into PyG's record, in the process that read it; pickles for spawn."""

    def __init__(self, transform: Callable[[Data], Data] | None) -> None:
        self._transform = transform

    def __call__(self, batch: Batch) -> Data:
        data = to_data(batch)
        return data if self._transform is None else self._transform(data)


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
        epoch=batch.epoch,
        step=batch.step,
        **batch.features,
    )
    if batch.x is None:
        data.num_nodes = batch.num_nodes
    if batch.e_id is not None:
        data.e_id = batch.e_id
    return data
