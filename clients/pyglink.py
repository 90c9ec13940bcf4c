"""`LinkNeighborLoader` as PyG has it, over a daemon: one changed line in a training script."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from clients.dataset import RECONNECT_S
from clients.link import Exclude, LinkBatch, LinkDataset
from clients.pyg import to_data
from clients.torch import Fanouts

_LINK_FIELDS = ("edge_label_index", "edge_label", "src_index", "dst_pos_index", "dst_neg_index")


class LinkNeighborLoader(DataLoader[Any]):
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `LinkNeighborLoader`.

    The first argument is the endpoint of a daemon where PyG has the data:

        LinkNeighborLoader("ipc:///run/graph.sock", [10, 10], train_edges, neg_sampling_ratio=1.0)

    Each iteration is the next epoch, with workers or without; `set_epoch` chooses.  As with PyG's,
    seed edges stay in the sampled neighborhoods unless `exclude` says otherwise.
    """

    dataset: LinkDataset

    def __init__(
        self,
        data: str,
        num_neighbors: Fanouts,
        edge_label_index: Tensor | str | None = None,
        edge_label: Tensor | None = None,
        *,
        replace: bool = False,
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: float | None = None,
        transform: Callable[[Data], Data] | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        exclude: Exclude = "none",
        seed: int = 0,
        plan: str = "auto",
        return_e_id: bool = False,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        reconnect_s: float = RECONNECT_S,
        **options: Any,
    ) -> None:
        """`edge_label_index`: (2, edges) original ids, the name of a split of edges, or all edges
        where it is None.  `options` are those of `torch.utils.data.DataLoader`."""
        if not isinstance(data, str):
            raise TypeError(
                f"data: {type(data).__name__}, expected a daemon's endpoint, ipc:///..."
            )
        negatives = _negatives(neg_sampling, neg_sampling_ratio)
        dataset = LinkDataset(
            data,
            "all" if edge_label_index is None else edge_label_index,
            num_neighbors,
            batch_size,
            seed,
            plan,
            edge_label=edge_label,
            negatives="none" if negatives is None else negatives.mode.value,
            amount=0.0 if negatives is None else negatives.amount,
            exclude=exclude,
            shuffle=shuffle,
            return_e_id=return_e_id,
            rank=rank,
            world_size=world_size,
            window=window,
            replace=replace,
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


class _Collate:
    """Turns each batch into PyG's record, in the process that read it; pickles for spawn."""

    def __init__(self, transform: Callable[[Data], Data] | None) -> None:
        self._transform = transform

    def __call__(self, batch: LinkBatch) -> Data:
        data = to_link_data(batch)
        return data if self._transform is None else self._transform(data)


def to_link_data(batch: LinkBatch) -> Data:
    """The same tensors as PyG's record; nothing is copied."""
    data = to_data(batch)
    del data.batch_size  # PyG's has none: its batches count edges
    for name in _LINK_FIELDS:
        if (value := getattr(batch, name)) is not None:
            data[name] = value
    return data
