"""Drop-in replacements for PyG's `NeighborLoader` and `LinkNeighborLoader`, over a daemon."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

try:
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.loader import NeighborLoader as GraphLoader
    from torch_geometric.sampler import NegativeSampling
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'clients.pyg: found no {error.name}, expected it: pip install "blockstore[pyg]"',
        name=error.name,
    ) from None

from clients.bidirectional import with_reverses
from clients.dataset import SteppedDataset
from clients.link import HeteroLinkBatch, HeteroLinkDataset, LinkBatch, LinkDataset, LinkOptions
from clients.pygdata import StoreData, StoreDataset, stored_data
from clients.torch import (
    Batch,
    EdgeType,
    Fanouts,
    HeteroBatch,
    HeteroDataset,
    InputNodes,
    NeighborDataset,
    Times,
    by_type,
)
from loaderd.api.protocol import Attach

__all__ = [
    "Collate", "LinkNeighborLoader", "NeighborLoader", "StoreData", "StoreDataset", "to_data"
]  # fmt: skip

Transform = Callable[[Any], Any]  # of a Data or a HeteroData
Edges = Tensor | str | None
NO_NAMES: Mapping[str, str] = MappingProxyType({})
# names that PyG and this module use
_FIELDS = {
    "edge_index", "edge_label", "edge_label_index", "edge_label_time", "edge_weight", "edge_time"
}  # fmt: skip


class DaemonLoader(DataLoader[Any]):
    """A loader over a dataset of a daemon, which keeps the position in the epochs."""

    dataset: SteppedDataset[Any]
    # each batch is complete and already this rank's: Accelerate must not split it
    _is_accelerate_prepared = True

    def __init__(
        self, dataset: SteppedDataset[Any], options: dict[str, Any], names: Mapping[str, str]
    ) -> None:
        """`options` are `transform` and those of `DataLoader`; `names` as in `to_data`."""
        # it gets one batch, not a list, as there is no batch_size
        kind = _value(options.get("subgraph_type", "directional"))
        self._collate = Collate(options.pop("transform", None), names, kind == "bidirectional")
        self._leaves_last = bool(options.pop("drop_last", False))
        request = dataset.request
        dataset.counts_seeds = True
        kept = data_loader_options(type(self).__name__, options, request)
        if self._leaves_last and request.plan == "macrobatch":
            raise TypeError(
                "drop_last=True: found plan 'macrobatch', whose batches have several sizes, "
                "expected another plan; leave drop_last out"
            )
        collate: Any = self._collate
        DataLoader.__init__(self, dataset, batch_size=None, collate_fn=collate, **kept)

    def __len__(self) -> int:
        steps = self.dataset.num_steps
        if self._leaves_last:
            resolved = self.dataset.attached().resolved
            steps -= resolved.num_seeds % resolved.batch_size > 0
        return steps

    def __iter__(self) -> Any:
        """Iterate the next epoch, unless `set_epoch` chose another one."""
        if self._leaves_last:
            self._collate.steps = len(self)
        batches = DataLoader.__iter__(self)
        if self.num_workers:  # they have copies of the dataset, and count for themselves
            self.dataset.skip_epoch()
        return (b for b in batches if b is not None) if self._leaves_last else batches

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self, batch: Data | HeteroData | None = None) -> dict[str, Any]:
        """The state to save, to continue after `batch`, which must be given with workers."""
        return self.dataset.state_dict(batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next iteration, after the last batch that `state` counts as consumed."""
        self.dataset.load_state_dict(state)


def check_arguments(
    data: object, options: dict[str, Any], **times: object
) -> tuple[StoreData, dict[str, str]]:
    """The data, and the names that `weight_attr` and `time_attr` give to the values of edges.

    Replaces both in `options`: weights and times are the store's, edges are drawn by them.

    Raises TypeError: the data is a graph itself, or `time_attr` is given without seed times.
    """
    found = stored_data(data, options)
    if found.store:
        options["store"] = found.store
    time_attr, weight_attr = options.pop("time_attr", None), options.pop("weight_attr", None)
    for name, given in times.items():
        if time_attr is not None and given is None:
            raise TypeError(f"time_attr without {name}, expected a time of each seed")
    if weight_attr is not None:
        options |= {"weighted": True, "edge_weights": True}
    if time_attr is not None:
        options["edge_times"] = True
    names = {"edge_weight": weight_attr, "edge_time": time_attr}
    return found, {name: attr for name, attr in names.items() if attr is not None}


class _Accepted(NamedTuple):
    """A parameter of PyG's loaders that is checked, but not passed on to the dataset."""

    values: tuple[Any, ...]
    otherwise: str  # why other values are refused, and what to do


_NO_SAMPLER = "neighbors are drawn in the daemon"
_INDUCED = (
    "of seeds that are edges a batch holds the edges that were drawn, not all between its nodes; "
    "take 'directional' or 'bidirectional'"
)
_ACCEPTED = {
    "directed": _Accepted((True,), _INDUCED),
    "subgraph_type": _Accepted(("directional", "bidirectional"), _INDUCED),
    "disjoint": _Accepted(
        (False,),
        "seeds have subgraphs of their own with times alone; give times of the seeds, or "
        "batch_size=1, or leave disjoint out",
    ),
    "transform_sampler_output": _Accepted(
        (None,), f"{_NO_SAMPLER}, and its output is never here; give transform, of the batch"
    ),
    "neighbor_sampler": _Accepted(
        (None,), f"{_NO_SAMPLER}; give sampler='labor', weight_attr or replace, or leave it out"
    ),
    "input_id": _Accepted(
        (None,), "input_id of a batch is the place of each seed among all; index yours by it"
    ),
    "custom_cls": _Accepted(
        (None,), "batches are Data or HeteroData; give transform to make others"
    ),
    # the store is sorted, and rows are gathered by whoever reads the batch
    "is_sorted": _Accepted((True, False), "it changes nothing; leave it out"),
    "filter_per_worker": _Accepted((None, True, False), "it changes nothing; leave it out"),
}
_MADE_HERE = {
    "batch_sampler": "seeds are input_nodes; give ids in any order, and batch_size",
    "collate_fn": "batches come as PyG's records; give transform",
    "dataset": "it is made here; give the endpoint and input_nodes",
}
_TAKEN = {"self", "batch_size", "shuffle", "sampler", "drop_last", *_MADE_HERE}
_DATA_LOADER = set(inspect.signature(DataLoader.__init__).parameters) - _TAKEN


def take_ours(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of datasets out of `options`."""
    return {
        name: options.pop(name) for name in list(options) if name in LinkOptions.__annotations__
    }


def take_induced(options: dict[str, Any]) -> None:
    """Replace PyG's `subgraph_type="induced"` (`directed=False`) by the plan that provides it.

    Raises TypeError: a plan is given, too.
    """
    kind, directed = options.get("subgraph_type"), options.get("directed")
    if _value(kind) != "induced" and directed is not False:
        return
    name = "subgraph_type" if directed is None else "directed"
    if options.get("plan", "auto") != "auto":
        raise TypeError(
            f"NeighborLoader: found {name}={_value(options[name])!r} and plan {options['plan']!r}, "
            "expected no plan, as it is one of its own; leave one of them out"
        )
    options.pop("subgraph_type", None)
    options.pop("directed", None)
    options["plan"] = "shadow" if options.pop("disjoint", False) else "induced"


def typed_seeds(seeds: Any) -> tuple[Any, Any]:
    """The type of seed nodes or edges (None if not given), and the seeds."""
    if isinstance(seeds, tuple) and len(seeds) == 2 and isinstance(seeds[0], str | tuple):
        return seeds
    return None, seeds


def _value(given: Any) -> Any:
    """The value of a member of a PyG enumeration; others unchanged."""
    return getattr(given, "value", given)


def data_loader_options(loader: str, options: dict[str, Any], request: Attach) -> dict[str, Any]:
    """The options for `DataLoader`.  Raises TypeError: one is not supported here."""
    kept = {}
    for name, value in options.items():
        accepted, found = _ACCEPTED.get(name), _value(value)
        if name == "disjoint" and request.temporal is not None:
            continue  # seeds with times are disjoint anyway
        if accepted is not None and any(found is v or found == v for v in accepted.values):
            continue
        if accepted is not None:
            if name == "subgraph_type" and found != "induced":  # supported if seeds are nodes
                raise TypeError(
                    f"{loader}: found {name}={found!r}, expected 'directional', 'bidirectional' or "
                    "'induced'"
                )
            expected = " or ".join(map(repr, accepted.values))
            raise TypeError(
                f"{loader}: found {name}={found!r}, expected {expected}: {accepted.otherwise}"
            )
        if name in _MADE_HERE:
            if value is not None:
                raise TypeError(f"{loader}: found {name}, expected none: {_MADE_HERE[name]}")
            continue
        if name not in _DATA_LOADER:
            raise TypeError(
                f"{loader}: found {name}={value!r}, expected no such option; leave it out"
            )
        kept[name] = value
    return kept


class NeighborLoader(DaemonLoader, GraphLoader):  # type: ignore[misc]
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `NeighborLoader`.

    The first argument is the endpoint of a daemon instead of PyG's data, or a `StoreData`:

        NeighborLoader("ipc:///run/graph.sock", num_neighbors=[15, 10], input_nodes="train")

    If seeds are given with their type, as PyG does with several types, it yields `HeteroData`:

        NeighborLoader("ipc:///run/graph.sock", {("paper", "cites", "paper"): [15, 10], ...},
                       input_nodes=("paper", "train"))

    Each iteration is the next epoch, with workers or without; `set_epoch` chooses.  It is an
    instance of PyG's loader, so that `model.inference(loader)` of PyG's models accepts it;
    `clients.inference.layerwise` does that out of core.
    """

    dataset: NeighborDataset | HeteroDataset
    filter_per_worker = True  # for PyG: batches are finished when they come

    def __init__(
        self,
        data: str | StoreData,
        num_neighbors: Fanouts,
        input_nodes: InputNodes | tuple[str, InputNodes] = None,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        input_time: Times | None = None,
        **options: Any,
    ) -> None:
        """`input_nodes`: ids, a bool mask, the name of a split, or None for all nodes; or
        (node type, one of these).  `num_neighbors`: a list, or a list for each edge type, in PyG's
        order: from the seeds outward.  `input_time`: a time for each input node; edges up to it are
        sampled, by their times in the store, whatever `time_attr` is called there.  `options` are
        `transform`, `clients.torch.SamplingOptions`, and those of
        `torch.utils.data.DataLoader`: num_workers, pin_memory, ..."""
        self.data, names = check_arguments(data, options, input_time=input_time)
        take_induced(options)
        node_type, nodes = typed_seeds(input_nodes)
        dataset = (NeighborDataset if node_type is None else HeteroDataset)(
            self.data.endpoint,
            num_neighbors=num_neighbors,
            batch_size=batch_size,
            input_nodes="all" if nodes is None else nodes,
            input_type=node_type or "",
            input_time=input_time,
            shuffle=shuffle,
            **take_ours(options),
        )
        super().__init__(dataset, options, names)
        self.node_sampler = SimpleNamespace(num_neighbors=num_neighbors)  # PyG's models look there


class LinkNeighborLoader(DaemonLoader):
    """Yields `torch_geometric.data.Data` with the fields of PyG's own `LinkNeighborLoader`.

    The first argument is the endpoint of a daemon instead of PyG's data:

        LinkNeighborLoader("ipc:///run/graph.sock", [10, 10], train_edges, neg_sampling_ratio=1.0)

    If edges are given with their type, (edge type, edges), it yields `HeteroData`.  Each iteration
    is the next epoch, with workers or without; `set_epoch` chooses.  As with PyG's, seed edges stay
    in the sampled neighborhoods unless `exclude` says otherwise.
    """

    dataset: LinkDataset | HeteroLinkDataset

    def __init__(
        self,
        data: str | StoreData,
        num_neighbors: Fanouts,
        edge_label_index: Edges | tuple[EdgeType, Edges] = None,
        edge_label: Tensor | None = None,
        edge_label_time: Times | Literal["own"] | None = None,
        *,
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: float | None = None,
        **options: Any,
    ) -> None:
        """`edge_label_index`: (2, edges) original ids, the name of a split of edges, or None for
        all edges; or (edge type, one of these).  `edge_label_time`: a time for each edge; edges up
        to it are sampled, by their times in the store, whatever `time_attr` is called there;
        "own": edges before the seed edges' times in the store.  `options` are batch_size=1,
        shuffle=False, exclude="none", `transform`, others of `clients.link.LinkOptions`, and those
        of `torch.utils.data.DataLoader`."""
        self.data, names = check_arguments(data, options, edge_label_time=edge_label_time)
        edge_type, edges = typed_seeds(edge_label_index)
        negatives = _negatives(neg_sampling, neg_sampling_ratio)
        ours: dict[str, Any] = {"shuffle": False, "exclude": "none"} | take_ours(options)
        dataset = (LinkDataset if edge_type is None else HeteroLinkDataset)(
            self.data.endpoint,
            "all" if edges is None else edges,
            num_neighbors,
            options.pop("batch_size", 1),
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            relation=edge_type,
            negatives="none" if negatives is None else negatives.mode.value,
            amount=0.0 if negatives is None else negatives.amount,
            **ours,
        )
        super().__init__(dataset, options, names)


def _negatives(
    sampling: NegativeSampling | str | dict[str, Any] | None, ratio: float | None
) -> NegativeSampling | None:
    """Interpret the two options as PyG does.  Raises ValueError."""
    if ratio:
        sampling = NegativeSampling("binary", ratio)
    try:
        found: NegativeSampling | None = NegativeSampling.cast(sampling)
    except ValueError as error:
        raise ValueError(f"neg_sampling: {error}, expected 'binary' or 'triplet'") from error
    if found is not None and (found.src_weight is not None or found.dst_weight is not None):
        raise ValueError("neg_sampling has weights, expected none: negatives are drawn uniformly")
    return found


class Collate:
    """Turns each batch into PyG's record, in the process that read it; pickles for spawn."""

    def __init__(
        self,
        transform: Transform | None = None,
        names: Mapping[str, str] = NO_NAMES,
        bidirectional: bool = False,
    ) -> None:
        """`names`, `bidirectional`: as in `to_data`."""
        self._transform, self._names = transform, dict(names)
        self._bidirectional = bidirectional
        self.steps = 1 << 62  # batches of later steps become None

    def __call__(self, batch: Batch | HeteroBatch) -> Any:
        if batch.step >= self.steps:
            return None
        data = to_data(batch, self._names, self._bidirectional)
        return data if self._transform is None else self._transform(data)


def to_data(
    batch: Batch | HeteroBatch,
    names: Mapping[str, str] = NO_NAMES,
    bidirectional: bool = False,
) -> Any:
    """Convert a batch to PyG's `Data` or `HeteroData`; nothing is copied.

    names           other names for "edge_weight" and "edge_time"
    bidirectional   add the reverse of each edge, to the relation that is its reverse
    """
    several, typed = isinstance(batch, HeteroBatch), by_type(batch)
    data: Any = HeteroData() if several else Data()
    for name, ids in typed.n_id.items():
        nodes: dict[str, Any] = {"n_id": ids, "num_sampled_nodes": typed.num_sampled_nodes[name]}
        nodes |= typed.features.get(name, {})
        for field, rows in (("x", typed.x), ("y", typed.y)):
            if name in rows:
                nodes[field] = rows[name]
        if "x" not in nodes:
            nodes["num_nodes"] = ids.numel()
        if name == typed.input_type:
            nodes |= {"input_id": batch.input_id, "batch_size": batch.batch_size}
            if batch.seed_time is not None:
                nodes["seed_time"] = batch.seed_time
        if typed.batch is not None:
            nodes["batch"] = typed.batch[name]
        (data[name] if several else data).update(nodes)
    by_relation: dict[EdgeType, dict[str, Any]] = {}
    for relation, edge_index in typed.edge_index.items():
        edges = by_relation[relation] = {
            "edge_index": edge_index, "num_sampled_edges": typed.num_sampled_edges[relation]
        }  # fmt: skip
        if typed.e_id is not None:
            edges["e_id"] = typed.e_id[relation]
        edges |= edge_fields(typed.edge_features.get(relation, {}))
        for name, values in (("edge_weight", typed.edge_weight), ("edge_time", typed.edge_time)):
            if values is not None and relation in values:
                edges[names.get(name, name)] = values[relation]
    if bidirectional:
        by_relation = with_reverses(by_relation)
        for store in data.node_stores:
            del store.num_sampled_nodes
    for relation, edges in by_relation.items():
        (data[relation] if several else data).update(edges)
    data.epoch, data.step = batch.epoch, batch.step
    if isinstance(batch, LinkBatch | HeteroLinkBatch):
        _add_seed_edges(data, batch)
    return data


def _add_seed_edges(data: Any, batch: LinkBatch | HeteroLinkBatch) -> None:
    """Add the fields of the seed edges; with several types, to those of their edge type."""
    src = dst = edges = data
    if isinstance(batch, HeteroLinkBatch):
        edges = data[batch.edge_type]
        src, dst = data[batch.edge_type[0]], data[batch.edge_type[2]]
        edges.input_id = batch.input_id
    else:
        del data.batch_size  # PyG's has none: its batches count edges
        if "seed_time" in data:
            del data.seed_time
    if batch.src_index is None:
        edges.edge_label_index, edges.edge_label = batch.edge_label_index, batch.edge_label
        edges.edge_label_time = batch.edge_label_time
    else:
        src.src_index, dst.dst_pos_index = batch.src_index, batch.dst_pos_index
        dst.dst_neg_index = batch.dst_neg_index
        src.seed_time = dst.seed_time = batch.seed_time


def edge_fields(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of edges as `edge_attr` if there is one array, else as `edge_<name>` each."""
    if len(features) == 1:
        return {"edge_attr": next(iter(features.values()))}
    names = {name: name if name.startswith("edge_") else f"edge_{name}" for name in features}
    return {f"edge_attr_{n}" if full in _FIELDS else full: features[n] for n, full in names.items()}
