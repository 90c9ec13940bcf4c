"""`NeighborLoader` as PyG has it, over a daemon: one changed line in a training script."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData

from clients.dataset import RECONNECT_S, SteppedDataset
from clients.hetero import HeteroBatch, HeteroDataset
from clients.torch import Batch, Fanouts, InputNodes, NeighborDataset, Times

Transform = Callable[[Any], Any]  # of a Data or a HeteroData
_FIELDS = {"edge_index", "edge_label", "edge_label_index", "edge_label_time"}  # of PyG's own


class DaemonLoader(DataLoader[Any]):
    """A loader over a dataset of a daemon, which keeps the place in the epochs."""

    dataset: SteppedDataset[Any]
    # batches are whole, and of one rank where there are several: Accelerate is to leave them alone
    _is_accelerate_prepared = True

    def __iter__(self) -> Iterator[Data | HeteroData]:  # type: ignore[override]
        """An epoch; each iteration is the next one, unless `set_epoch` chose."""
        batches = super().__iter__()
        if self.num_workers:  # they took the dataset's position along, and count on their own
            self.dataset.skip_epoch()
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self.dataset.set_epoch(epoch)

    def state_dict(self, batch: Data | HeteroData | None = None) -> dict[str, Any]:
        """What to save to go on after `batch`; with workers it must be given."""
        return self.dataset.state_dict(batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, at the next iteration, after the last batch that `state` counts as consumed."""
        self.dataset.load_state_dict(state)


def check_endpoint(data: object) -> None:
    """Raises TypeError: graphs themselves are not taken."""
    if not isinstance(data, str):
        raise TypeError(f"data: {type(data).__name__}, expected a daemon's endpoint, ipc:///...")


# of PyG's loaders, with the values that ask for nothing else than what is done
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "directed": (True,), "disjoint": (False,), "subgraph_type": ("directional",),
    "weight_attr": (None,), "transform_sampler_output": (None,), "is_sorted": (True, False),
    "filter_per_worker": (None, True, False), "neighbor_sampler": (None,), "custom_cls": (None,),
    "drop_last": (False,),
}  # fmt: skip
_TAKEN = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn"}
_DATA_LOADER = set(inspect.signature(DataLoader.__init__).parameters) - _TAKEN


def data_loader_options(loader: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of `DataLoader`.  Raises TypeError: one asks for what is not done here."""
    kept = {}
    for name, value in options.items():
        if name in _NEUTRAL and getattr(value, "value", value) in _NEUTRAL[name]:
            continue
        if name in _NEUTRAL or name not in _DATA_LOADER:
            expected = " or ".join(repr(v) for v in _NEUTRAL.get(name, ())) or "no such option"
            raise TypeError(f"{loader}: found {name}={value!r}, expected {expected}; leave it out")
        kept[name] = value
    return kept


class NeighborLoader(DaemonLoader):
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `NeighborLoader`.

    The first argument is the endpoint of a daemon where PyG has the data:

        NeighborLoader("ipc:///run/graph.sock", num_neighbors=[15, 10], input_nodes="train")

    Where seeds are given with their type, as PyG has it of several, it yields `HeteroData`:

        NeighborLoader("ipc:///run/graph.sock", {("paper", "cites", "paper"): [15, 10], ...},
                       input_nodes=("paper", "train"))

    Each iteration is the next epoch, with workers or without; `set_epoch` chooses.
    """

    dataset: NeighborDataset | HeteroDataset

    def __init__(
        self,
        data: str,
        num_neighbors: Fanouts,
        input_nodes: InputNodes | tuple[str, InputNodes] = None,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        transform: Transform | None = None,
        seed: int = 0,
        plan: str = "auto",
        return_e_id: bool = False,
        edge_features: bool = False,
        replace: bool = False,
        weighted: bool = False,
        input_time: Times | None = None,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        time_attr: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        store: str = "",
        reconnect_s: float = RECONNECT_S,
        **options: Any,
    ) -> None:
        """`input_nodes`: ids, a bool mask, the name of a split, or all nodes where it is None; or
        (node type, one of these).  `num_neighbors`: a list, or a list for each edge type, in PyG's
        order: from the seeds outward.  `input_time`: a time of each input node, up to which edges
        are sampled, by their times in the store, whatever `time_attr` was called there.  `options`
        are those of `torch.utils.data.DataLoader`: num_workers, pin_memory, ..."""
        check_endpoint(data)
        if time_attr is not None and input_time is None:
            raise TypeError("time_attr without input_time, expected a time of each input node")
        node_type, nodes = _typed(input_nodes)
        make = NeighborDataset if node_type is None else HeteroDataset
        dataset = make(
            data,
            num_neighbors=num_neighbors,
            batch_size=batch_size,
            seed=seed,
            plan=plan,
            input_nodes="all" if nodes is None else nodes,
            input_type=node_type or "",
            shuffle=shuffle,
            return_e_id=return_e_id,
            edge_features=edge_features,
            replace=replace,
            weighted=weighted,
            input_time=input_time,
            temporal_strategy=temporal_strategy,
            rank=rank,
            world_size=world_size,
            window=window,
            store=store,
            reconnect_s=reconnect_s,
        )
        collate: Any = Collate(transform)  # of one batch, not of a list: there is no batch_size
        kept = data_loader_options("NeighborLoader", options)
        super().__init__(dataset, batch_size=None, collate_fn=collate, **kept)


def _typed(nodes: Any) -> tuple[str | None, Any]:
    """The seeds' type, where it is given, and the seeds."""
    if isinstance(nodes, tuple) and len(nodes) == 2 and isinstance(nodes[0], str):
        return nodes
    return None, nodes


class Collate:
    """Turns each batch into PyG's record, in the process that read it; pickles for spawn."""

    def __init__(self, transform: Transform | None = None) -> None:
        self._transform = transform

    def __call__(self, batch: Batch | HeteroBatch) -> Any:
        data = to_hetero_data(batch) if isinstance(batch, HeteroBatch) else to_data(batch)
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
    for name in ("e_id", "batch", "seed_time"):
        if (value := getattr(batch, name)) is not None:
            data[name] = value
    data.update(edge_fields(batch.edge_features))
    return data


def edge_fields(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of edges as `edge_attr` where there is one array, else as `edge_<name>` each."""
    if len(features) == 1:
        return {"edge_attr": next(iter(features.values()))}
    names = {name: name if name.startswith("edge_") else f"edge_{name}" for name in features}
    return {f"edge_attr_{n}" if full in _FIELDS else full: features[n] for n, full in names.items()}


def to_hetero_data(batch: HeteroBatch) -> HeteroData:
    """The same tensors as PyG's record of several types; nothing is copied."""
    data = HeteroData()
    for name, ids in batch.n_id.items():
        fields: dict[str, Any] = {
            "n_id": ids, "num_sampled_nodes": batch.num_sampled_nodes[name],
            **batch.features.get(name, {}),
        }  # fmt: skip
        for field, rows in (("x", batch.x), ("y", batch.y)):
            if name in rows:
                fields[field] = rows[name]
        if "x" not in fields:
            fields["num_nodes"] = ids.numel()
        if name == batch.input_type:
            fields |= {"input_id": batch.input_id, "batch_size": batch.batch_size}
            if batch.seed_time is not None:
                fields["seed_time"] = batch.seed_time
        if batch.batch is not None:
            fields["batch"] = batch.batch[name]
        data[name].update(fields)
    for relation, edge_index in batch.edge_index.items():
        edges: dict[str, Any] = {
            "edge_index": edge_index, "num_sampled_edges": batch.num_sampled_edges[relation]
        }  # fmt: skip
        if batch.e_id is not None:
            edges["e_id"] = batch.e_id[relation]
        edges |= edge_fields(batch.edge_features.get(relation, {}))
        data[relation].update(edges)
    data.epoch, data.step = batch.epoch, batch.step
    return data
