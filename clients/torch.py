"""Datasets that yield sampled batches as torch tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clients.batch import BatchReader
from clients.connection.request import fanout_fields, relation_name
from clients.connection.session import Session
from clients.dataset import (
    Connection,
    DatasetOptions,
    Reader,
    SteppedDataset,
    gather_threads,
    make_request,
)
from clients.hopwise.batch import HopBatch
from clients.hopwise.dataset import HopDataset
from clients.prefetch import Prefetcher, prefetch
from clients.records import TensorRecord
from loaderd.api.errors import Refused
from loaderd.api.protocol import ArrayChoice, Attach, Attached, Labor, RowChoice, Temporal

__all__ = [
    "Batch",
    "HeteroBatch",
    "HeteroDataset",
    "HopBatch",
    "HopDataset",
    "NeighborDataset",
    "Prefetcher",
    "SamplingOptions",
    "prefetch",
]

InputNodes = Tensor | NDArray[Any] | Sequence[int] | str | None
EdgeType = tuple[str, str, str]  # source type, name, target type
Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
Times = Tensor | NDArray[Any] | Sequence[int]
B_co = TypeVar("B_co", covariant=True)
MAX_REUSE = 4  # most passes over the seeds of a macro-batch with reuse="while-waiting"


@dataclass(slots=True, repr=False)
class Batch(TensorRecord):
    """A sampled subgraph in PyG's fields; nodes are local ids, the first `batch_size` the seeds."""

    x: Tensor | None  # (num_nodes, ...) features
    y: Tensor | None  # (num_nodes, ...) labels; int64 if they are integers
    edge_index: Tensor  # int64 (2, num_edges): row 0 source, row 1 target
    n_id: Tensor  # int64 (num_nodes,) original ids
    e_id: Tensor | None  # int64 (num_edges,) original edge ids, if asked for
    input_id: Tensor  # int64 (batch_size,) places among the input nodes
    batch_size: int
    num_sampled_nodes: list[int]  # the seeds, then those found by each hop
    num_sampled_edges: list[int]  # per hop
    epoch: int
    step: int
    features: dict[str, Tensor] = field(default_factory=dict)  # further per-node arrays
    frontier: str = "new"  # "layer": hops expand all nodes found so far
    # if edges are sampled up to a time: nodes are not shared between seeds
    batch: Tensor | None = None  # int64 (num_nodes,) place of its seed in the batch
    seed_time: Tensor | None = None  # int64 (batch_size,)
    # rows of the edges by the name of their array, if asked for
    edge_features: dict[str, Tensor] = field(default_factory=dict)  # (num_edges, ...)
    edge_weight: Tensor | None = None  # float32 (num_edges,), if asked for
    edge_time: Tensor | None = None  # int64 (num_edges,), if asked for

    @property
    def num_nodes(self) -> int:
        return self.n_id.numel()


@dataclass(slots=True, repr=False)
class HeteroBatch(TensorRecord):
    """A sampled subgraph of several node types in PyG's fields; ids are local within their type.

    The first `batch_size` nodes of `input_type` are the seeds.  Every type and every relation of
    the store is there, even without nodes or edges; `x`, `y` and `features` have the types that
    hold them.
    """

    x: dict[str, Tensor]  # (nodes, ...) features
    y: dict[str, Tensor]  # (nodes, ...) labels; int64 if they are integers
    edge_index: dict[EdgeType, Tensor]  # int64 (2, edges): row 0 source, row 1 target
    n_id: dict[str, Tensor]  # int64 (nodes,) original ids, of each type its own
    e_id: dict[EdgeType, Tensor] | None  # int64 (edges,) original edge ids, if asked for
    input_type: str
    input_id: Tensor  # int64 (batch_size,) places among the input nodes
    batch_size: int
    num_sampled_nodes: dict[str, list[int]]  # among the seeds, then those found by each hop
    num_sampled_edges: dict[EdgeType, list[int]]  # per hop
    epoch: int
    step: int
    features: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # more, by type and name
    frontier: str = "new"  # "layer": hops expand all nodes found so far
    # if edges are sampled up to a time: nodes are not shared between seeds
    batch: dict[str, Tensor] | None = None  # int64 (nodes,) place of the seed in the batch
    seed_time: Tensor | None = None  # int64 (batch_size,)
    # rows of the edges by relation and the name of their array, if asked for
    edge_features: dict[EdgeType, dict[str, Tensor]] = field(default_factory=dict)
    # if asked for, of the relations that have any
    edge_weight: dict[EdgeType, Tensor] | None = None  # float32 (edges,)
    edge_time: dict[EdgeType, Tensor] | None = None  # int64 (edges,)

    @property
    def num_nodes(self) -> dict[str, int]:
        return {name: ids.numel() for name, ids in self.n_id.items()}


_BY_TYPE = ("x", "y", "n_id", "num_sampled_nodes", "features", "batch")
_BY_RELATION = (
    "edge_index", "e_id", "num_sampled_edges", "edge_features", "edge_weight", "edge_time"
)  # fmt: skip
_MAY_BE_NONE = ("e_id", "batch", "edge_weight", "edge_time")
_ONLY_TYPE, _ONLY_RELATION = "", ("", "", "")  # keys for a `Batch`, which names neither


def rows_of_edges(batch: HeteroBatch, relation: EdgeType) -> dict[str, Tensor]:
    """Rows of the edges of a relation by array name; weights and times as "weight" and "time"."""
    found = dict(batch.edge_features.get(relation, {}))
    for name, values in (("weight", batch.edge_weight), ("time", batch.edge_time)):
        if values is not None and relation in values:
            found[name] = values[relation]
    return found


def only_type(found: dict[str, Any]) -> dict[str, Any]:
    """Reduce the fields of a typed batch with one node type and one relation to a `Batch`'s."""
    for name in ("input_type", "edge_type"):
        found.pop(name, None)
    for name in (*_BY_TYPE, *_BY_RELATION):
        if (own := found.get(name)) is not None:
            absent: Any = {} if name.endswith("features") else None
            found[name] = next(iter(own.values()), absent)
    return found


def by_type(batch: Batch | HeteroBatch) -> HeteroBatch:
    """The batch by type and relation; those of a `Batch` are named "" and ("", "", "")."""
    if isinstance(batch, HeteroBatch):
        return batch
    found = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    for names, key in ((_BY_TYPE, _ONLY_TYPE), (_BY_RELATION, _ONLY_RELATION)):
        for name in names:
            absent: Any = None if name in _MAY_BE_NONE else {}
            found[name] = absent if found[name] is None else {key: found[name]}
    return HeteroBatch(input_type=_ONLY_TYPE, **found)


class SamplingOptions(DatasetOptions, total=False):
    """Options of every dataset and loader of sampled batches, in addition to `DatasetOptions`.

    return_e_id         bring original edge ids
    features            names of the feature arrays to bring, () for none, all by default; or by
                        node type: {"paper": ("x", "year"), "author": ()}, with all arrays of types
                        that are not named.  Arrays that are left out are not read
    labels              bring labels (True); or the name of an array of features that comes as `y`
    edge_features       bring rows of the sampled edges from all edge arrays of the store (True); or
                        names of arrays, for all relations or by relation
    edge_weights        bring the weights of the sampled edges
    edge_times          bring the times of the sampled edges
    plan                "auto" (default), "minibatch", "hyperbatch", "macrobatch", or one of
                        subgraphs: "cluster", "saint-node", "saint-edge", "saint-walk", "shadow",
                        "induced", "ladies", "fastgcn", or a custom sampler that the daemon loaded
    hyperbatch          batches built together, 0: as many as fit; like `plan` (except for
                        "macrobatch"), it changes no batch
    frontier            "new" (default): a hop expands newly found nodes, as in PyG; "layer": all
                        nodes found so far, drawing again, as in DGL
    replace             draw with replacement
    weighted            draw neighbors by edge weight; an edge of weight 0 is never drawn.
                        With `replace` the draws are independent, each in proportion to the weights
    sampler             "neighbor" (default): each node draws its neighbors by itself; "labor": all
                        nodes that a hop expands prefer the same ones, so that a batch has fewer
                        nodes.  Not with `replace`, `weighted` or times of the seeds
    layer_dependency    with "labor": the hops of a batch prefer the same nodes, too
    batch_dependency    with "labor": this many batches in a row (1) prefer the same nodes, too
    cycle               epoch e repeats the draws of epoch e % cycle, so that packed epochs serve it
                        (0, the default: each epoch has its own draws)
    subgraph            options of a plan of subgraphs, such as {"partitions": 4} of plan "cluster"
                        (docs/samplers.md)
    temporal_strategy   with times of the seeds: "uniform" (default) draws any of the edges up to
                        the time, "last" takes the latest
    strict              with times of the seeds: take only edges before the time

    Plan "macrobatch", on a partitioned store, groups the partitions in each epoch,
    `macro_partitions` at a time (0: an eighth of them), and samples within the part of the graph
    that is in memory: these partitions, the store's `hubs`, and the partitions' `halos`.  `reuse`:
    passes over the seeds of each macro-batch, 1 to 4.  "while-waiting": up to 4, but no pass begins
    once the next macro-batch is loaded; the length of the dataset is then the most that an epoch
    can have, and batches depend on timing.
    """

    return_e_id: bool
    features: Sequence[str] | Mapping[str, Sequence[str]]
    labels: bool | str
    edge_features: bool | Sequence[str] | Mapping[EdgeType, Sequence[str]]
    edge_weights: bool
    edge_times: bool
    plan: str
    hyperbatch: int
    frontier: str
    replace: bool
    weighted: bool
    sampler: Literal["neighbor", "labor"]
    layer_dependency: bool
    batch_dependency: int
    cycle: int
    subgraph: Mapping[str, int]
    temporal_strategy: Literal["uniform", "last"]
    strict: bool | None
    macro_partitions: int
    reuse: int | Literal["while-waiting"]
    hubs: bool
    halos: bool


class SeededOptions(SamplingOptions, total=False):
    """Options of datasets of a store of one node type, in addition to `SamplingOptions`.

    input_nodes         as of `NeighborDataset`
    """

    input_nodes: InputNodes


class SampledDataset(SteppedDataset[B_co]):
    """Batches sampled around seeds, which are nodes here and edges in `clients.link`."""

    batch_type: Callable[..., B_co]  # called with the result of `_fields`
    several_types = ""  # if this takes one node type and relation: the class that takes more

    def _fields(self, found: dict[str, Any], attached: Attached) -> dict[str, Any]:
        """The fields of a batch of several types, from what a `BatchReader` has read."""
        del attached
        found.pop("store_id", None)  # of plan "partitions": for `LargeDataset` alone
        return found

    def _read_step(self, connection: Connection, step: int) -> Any:
        found = self._fields(connection.reader.read(step), connection.session.attached)
        return self.batch_type(**(only_type(found) if self.several_types else found))

    def _make_reader(self, session: Session) -> Reader:
        self._refuse_types(session)
        return BatchReader(session, self.memory, gather_threads())

    def _refuse_types(self, session: Session) -> None:
        """Raises Refused: several node types or relations, if this dataset takes one."""
        relations, types = session.attached.relations, session.attached.types
        if self.several_types and (len(relations) != 1 or len(types) != 1):
            raise Refused(
                f"{self.endpoint}: the store has {len(relations)} relations, a "
                f"{type(self).__name__} delivers stores of one; take {self.several_types}"
            )


class NodeSampledDataset(SampledDataset[B_co]):
    """Neighbor-sampled minibatches from a daemon; epochs and workers as in `SteppedDataset`."""

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        num_neighbors: Fanouts = (15, 10, 5),
        batch_size: int = 1000,
        *,
        input_nodes: InputNodes = None,
        input_type: str = "",
        input_time: Times | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        """`batch_size` counts the seeds of all ranks together.

        num_neighbors   fanouts from the seeds outward, -1 for all neighbors; with several relations
                        one list for all, or a list for each by (source type, name, target type);
                        0 leaves a relation out at a hop
        input_nodes     ids, a bool mask, or the name of a split ("all": every node), which is taken
                        instead of `split`
        input_type      node type of the seeds, if the store has several
        input_time      a time for each input node, in their order: only edges up to it are sampled,
                        and each seed has a subgraph of its own, as in PyG; the store must hold edge
                        times
        """
        if isinstance(input_nodes, str):
            split, input_nodes = input_nodes, None
        ids, mask_size = (None, 0) if input_nodes is None else seed_ids(input_nodes)
        request = sampling_request(
            options,
            "" if input_time is None else "given",
            split=split if ids is None else "",
            seed_type=input_type,
            batch_size=batch_size,
            mask_size=mask_size,
            **fanout_fields(num_neighbors),
        )
        numbers = timed_ids(ids, input_time)
        super().__init__(endpoint, request, numbers, options.get("reconnect_s"))


class NeighborDataset(NodeSampledDataset[Batch]):
    """Batches of a store of one node type and one relation."""

    batch_type, several_types = Batch, "clients.torch.HeteroDataset"


class HeteroDataset(NodeSampledDataset[HeteroBatch]):
    """Batches of a store of any number of node types and relations."""

    batch_type = HeteroBatch


def sampling_request(
    options: Mapping[str, Any], times: str, kind: type = SamplingOptions, **own: Any
) -> Attach:
    """Build the request of a dataset of sampled batches.

    times   of the seeds: "" for none, "given" with the request, "edges": the store's, of seed edges
    kind    `TypedDict` of the known options
    own     fields that the dataset sets itself, in place of options of these names

    Raises TypeError: an unknown option; Refused: options that do not go together.
    """
    own |= {"rows": _rows_of(options), "labels": True}
    own["edge_features"] = options.get("edge_features", False) not in (False, None)
    labor = _labor_of(options)
    if labor is not None:
        own["labor"] = labor
    if times:
        strict = options.get("strict")
        strict = times == "edges" if strict is None else strict
        own["temporal"] = Temporal(options.get("temporal_strategy", "uniform"), times, strict)
    if options.get("reuse") == "while-waiting":
        own |= {"reuse": MAX_REUSE, "waiting": True}
    return make_request(kind, options, own)


def _rows_of(options: Mapping[str, Any]) -> RowChoice | None:
    """Which row arrays the options ask for; None: all.  Raises Refused."""
    arrays: dict[str, tuple[str, ...]] = {}
    for option, every in (("features", ""), ("edge_features", "*")):
        asked = options.get(option)
        if asked is None or isinstance(asked, bool):
            continue
        for owner, names in (asked if isinstance(asked, Mapping) else {every: asked}).items():
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise Refused(f"{option}: found {names!r}, expected names, as ('x',)")
            arrays[owner if isinstance(owner, str) else relation_name(owner)] = tuple(names)
    labels = options.get("labels", True)
    if not arrays and labels is True:
        return None
    chosen = tuple(ArrayChoice(owner, names) for owner, names in arrays.items())
    return RowChoice(chosen, bool(labels), labels if isinstance(labels, str) else "")


def _labor_of(options: Mapping[str, Any]) -> Labor | None:
    """The options of sampler "labor"; None: another sampler was asked for.  Raises Refused."""
    sampler = options.get("sampler", "neighbor")
    if sampler not in ("neighbor", "labor"):
        raise Refused(f"sampler {sampler!r}: expected 'neighbor' or 'labor'")
    given = {name: options[name] for name in Labor.__struct_fields__ if name in options}
    if sampler == "labor":
        return Labor(**given)
    if given:
        names = " and ".join(given)
        raise Refused(
            f"{names}: found sampler 'neighbor', expected 'labor'; give sampler='labor' or leave "
            f"{names} out"
        )
    return None


def host_array(values: Any) -> NDArray[Any]:
    """A tensor, an array or a sequence as an array in host memory."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def seed_ids(nodes: Tensor | NDArray[Any] | Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Ids as a new int64 array, and the size of the bool mask they came from, or 0."""
    array = host_array(nodes)
    if array.ndim == 1 and not array.size:
        raise Refused("input_nodes: found none, expected at least one id")
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise Refused(f"input_nodes: {array.dtype} {array.shape}, expected 1-d ids or a bool mask")
    if array.dtype.kind == "b":
        if not array.any():
            raise Refused("input_nodes: found a mask without a node, expected at least one")
        return np.flatnonzero(array), array.size
    return array.astype(np.int64), 0


def timed_ids(ids: NDArray[np.int64] | None, times: Times | None) -> NDArray[np.int64] | None:
    """The numbers that follow a request: ids, then times, if there are any.  Raises Refused."""
    if times is None:
        return ids
    array = host_array(times)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Refused(f"times: {array.dtype} {array.shape}, expected integers, one for each seed")
    if array.size and int(array.min()) == np.iinfo(np.int64).min:
        raise Refused("times: -2^63 is none, expected later ones")
    return np.concatenate([np.empty(0, np.int64) if ids is None else ids, array.astype(np.int64)])
