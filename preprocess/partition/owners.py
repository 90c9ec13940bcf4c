"""Owner maps: which of several trainers owns each node, so that few edges cross between them.

The weight of an edge is how often it is expected to be sampled in a step, times the layers that use
it; that of a node is the sum over its in-edges, or how often it is expanded
(docs/derivations/owners.md).

`stream` makes five passes over the columns, by descending weight of nodes.  Two passes put nodes
into many clusters, as FENNEL does; the clusters, whose edges fit in memory, are then assigned to
owners; three more passes move nodes between owners.  Five passes with owners alone could not revise
the placement of the heaviest nodes, and cut up to 1.7 times as much as METIS.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall, StoreError
from blockstore.expansions import Expansions, read_expansions
from blockstore.flags import flag
from blockstore.format import OWNERS_FOLDER
from blockstore.kernels.random import make_key, permute_range
from blockstore.owners import OwnerMap, check_name, write_owners
from blockstore.store import Store
from blockstore.units import format_bytes
from preprocess.errors import BadInput
from preprocess.files.store import scan_size, stored_columns
from preprocess.kernels.partition import (
    NodeWeights,
    WeightedLoads,
    place_clusters,
    place_weighted,
    weigh_between,
)
from preprocess.partition.grouped import MAX_OWNERS, check_partitions, even_out, partitions_of
from preprocess.partition.metis import WHOLE, check_installed, metis_bytes, metis_partition
from preprocess.partition.partition import PartitionOptions, visited_fits
from preprocess.partition.report import greatest_over_mean
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.work import WorkFolder
from preprocess.stages.columns import ColumnFile, scan_columns
from preprocess.stages.csc import WholeColumns
from preprocess.stages.partition import Visits

Method = Literal["stream", "metis", "random"]
Weights = Literal["edges", "nodes"]
_MAX_NODES = 1 << 31  # twice as much fits in uint32, as marked sources need a bit
_NODE_BYTES = 64  # memory of a node: degrees, weights, orders, and sorting by weight
_TABLES = 4  # copies of the table of weights between pairs, temporary ones included
_STEP = 1 << 18  # nodes whose weights are computed at a time
_PURPOSE = 0x4F77_6E65  # part of the random key that no other draw uses

# tuned for the fewest cross edges on facebook, github, arxiv-cs and com-dblp, with 2, 4, 8 owners
_CLUSTERS = 0.6  # the number of clusters is the number of nodes to this power
_MAX_CLUSTERS = 2048  # each node is compared with all; a table of all pairs takes 32 MiB
_CLUSTER_PASSES, _OWNER_PASSES = 2, 3
_CLUSTER_SLACK = 2.0
_CLUSTER_PRICE = 0.1  # times FENNEL's price, as clusters will be merged and need not be balanced
_TRIES = 32  # attempts to merge clusters, each in another order
_PARTITION_SLACK = 1.02  # greatest share of training nodes, over the mean, if partitions allow it


@dataclass(frozen=True, slots=True)
class OwnerOptions:
    """Everything that decides a map, besides the graph and the counts."""

    panel: ClassVar = "Owner maps"
    name: str = flag("", "of the map that is made")
    owners: int = flag(4, "trainers that share the nodes", min=1, max=MAX_OWNERS)
    method: Method = flag("stream", "metis holds the whole graph", "--partitioner")
    weights: Weights = flag("edges", "of nodes: edges that they are expanded to, or times")
    balance: float = flag(1.05, "of stream: an owner's load is at most so many times the mean")
    seed: int = flag(0, "of random, and of what stream tries")
    from_partitions: bool = flag(
        False, "whole partitions of the store to each, training nodes even", "--from-partitions"
    )


class Weighted(NamedTuple):
    """Weights of nodes and edges, by store id."""

    node: NDArray[np.float32]  # (nodes,)
    edge: NDArray[np.float32]  # (nodes,): weight of each in-edge of a node
    loaded: NDArray[np.uint32] | None  # (nodes,): batches that contain a node, if counted


def make_owners(
    store: Store,
    counts: Path | None,
    options: OwnerOptions,
    progress: Progress,
    mem_bytes: int = 2 << 30,
) -> OwnerMap:
    """Make a map, and put it into the store.

    counts   a file of `loaderd presample`; None: as if each node were expanded once, with all edges

    Raises BadInput, BudgetTooSmall; StoreError about the file, or the name.
    """
    if not 1 <= options.balance <= 1000:
        raise BadInput.at("--balance", options.balance, "1 to 1,000", "choose another one")
    check_name(store, options.name)
    num_nodes = _check_graph(store)
    if options.from_partitions:
        check_partitions(store, options.owners)
    else:
        check_installed(options.method)
    share = mem_bytes - _NODE_BYTES * num_nodes - _table_bytes(store, options)
    minimum = 16 * store.manifest.block_bytes
    if share < minimum:
        raise BudgetTooSmall(
            f"--mem: found {format_bytes(mem_bytes)}, expected {format_bytes(minimum - share)} "
            f"more for weights of {num_nodes:,} nodes and tables of owners; give that"
        )
    target = store.path / OWNERS_FOLDER / options.name
    found = None if counts is None else _read_counts(store, counts)
    with (
        WorkFolder(target, "", True) as work,
        _stored(store, work.path / "columns", share, progress) as columns,
    ):
        weights = weigh_nodes(columns.degrees, found, options.weights)
        if options.from_partitions:
            partition, loads = partitions_of(store)
            table = weights_between(columns, weights.edge, partition, loads.size, share, progress)
            owner = group_partitions(table, loads, options)[partition]
        else:
            owner = _find(columns, weights, options, share, work.path, progress)
        facts = _facts(options, found) | measure(columns, weights, owner, options, share, progress)
    return write_owners(store, options.name, owner, options.owners, facts)


def _num_clusters(num_nodes: int, owners: int) -> int:
    return min(_MAX_CLUSTERS, max(4 * owners, int(num_nodes**_CLUSTERS)))


def _table_bytes(store: Store, options: OwnerOptions) -> int:
    """Bytes of the tables of weights between owners, and between clusters or partitions."""
    pieces = options.owners
    if options.from_partitions:
        pieces = store.manifest.types[0].num_partitions
    elif options.method == "stream":
        pieces = _num_clusters(store.manifest.num_nodes, options.owners)
    return _TABLES * 8 * pieces**2


def _check_graph(store: Store) -> int:
    """The store's number of nodes.  Raises BadInput: no map can be made for it."""
    manifest = store.manifest
    if len(manifest.types) != 1 or len(manifest.relations) != 1:
        raise BadInput.at(
            store.path, f"{len(manifest.types)} node types, {len(manifest.relations)} relations",
            "one of each", "owners are those of the nodes of one type",
        )  # fmt: skip
    if manifest.num_nodes >= _MAX_NODES:
        raise BadInput.at(
            store.path, f"{manifest.num_nodes:,} nodes", f"less than {_MAX_NODES:,}",
            "a partitioner holds them in 32 bits",
        )  # fmt: skip
    return manifest.num_nodes


def _read_counts(store: Store, path: Path) -> tuple[Expansions, NDArray[np.uint32]]:
    """Read a file of counts.  Raises StoreError: they are of another store."""
    found, counts = read_expansions(path)
    fingerprint, num_nodes = store.manifest.fingerprint, store.manifest.num_nodes
    if (found.fingerprint, found.num_nodes) != (fingerprint, num_nodes):
        raise StoreError(
            f"{path}: counts of fingerprint {found.fingerprint} and {found.num_nodes:,} nodes, "
            f"expected {fingerprint} and {num_nodes:,}; sample this store with `loaderd presample`"
        )
    return found, counts


@contextmanager
def _stored(store: Store, path: Path, share: int, progress: Progress) -> Iterator[ColumnFile]:
    """The columns of the store: in memory if they take little of `share`, else in a file."""
    (relation,) = store.manifest.relations
    held = None if visited_fits(relation.num_edges, share, True) else path
    with (
        ColumnFile(held, store.manifest.num_nodes, relation.num_edges) as columns,
        progress.stage("read columns", relation.num_edges, "edges") as stage,
    ):
        size = scan_size(share, store.manifest.block_bytes)
        for head, degrees, sources in stored_columns(store, relation, size):
            columns.append(WholeColumns(int(head[0]), degrees, sources, None))
            stage.advance(sources.size)
        columns.finish()
        yield columns


def weigh_nodes(
    degrees: NDArray[np.uint32],
    found: tuple[Expansions, NDArray[np.uint32]] | None,
    weights: Weights,
) -> Weighted:
    """Weights from counts `found` or, if None, as if each node were expanded once, with all edges.

    degrees   uint32 (nodes,)   in-degrees
    weights   of nodes: the number of edges they are expanded to, or of expansions
    """
    node, edge = np.ones(degrees.size, np.float32), np.ones(degrees.size, np.float32)
    if found is None:
        if weights == "edges":
            node[:] = degrees
        return Weighted(node, edge, None)
    facts, counts = found
    for first in range(0, degrees.size, _STEP):
        piece = slice(first, first + _STEP)
        degree = degrees[piece].astype(np.float64)
        times, edges = np.zeros(degree.size), np.zeros(degree.size)
        for hop, fanout in enumerate(facts.fanouts):
            used = facts.layers(hop) / max(1, facts.steps) * counts[hop, piece]
            times += used
            edges += used * (degree if fanout < 0 else np.minimum(fanout, degree))
        node[piece] = edges if weights == "edges" else times
        edge[piece] = edges / np.maximum(degree, 1)
    return Weighted(node, edge, counts[-1])


# -- finding owners -------------------------------------------------------------------------------


def _find(
    columns: ColumnFile,
    weights: Weighted,
    options: OwnerOptions,
    share: int,
    work: Path,
    progress: Progress,
) -> NDArray[np.uint16]:
    """The owner of each node, uint16 (nodes,)."""
    k, owner = options.owners, np.zeros(columns.degrees.size, np.uint16)
    if options.method == "random":
        places = np.empty(owner.size, np.uint32)
        permute_range(0, owner.size, owner.size, _key(options, 0), places)
        owner[:] = places % np.uint32(k)
    elif k > 1 and options.method == "metis":
        need = metis_bytes(columns, True)
        if need > share:
            raise BudgetTooSmall(
                f"--mem: METIS holds the whole graph and takes {format_bytes(need)}, of which "
                f"{format_bytes(need - share)} are missing; give them, or take stream"
            )
        owner[:] = metis_partition(columns, k, progress, (weights.node, weights.edge))
    elif k > 1 and owner.size:
        settings = PartitionOptions(k, "fennel")
        with Visits(
            columns, settings, options.seed, share, work, progress, _ranks(weights.node)
        ) as visits:
            found = _Streaming(columns, visits, weights, options, share, progress).find()
            owner[visits.order] = found
    return owner


def _key(options: OwnerOptions, number: int) -> np.uint64:
    return np.uint64(make_key(options.seed, _PURPOSE, number, 0, 0))


def _ranks(weights: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Weights scaled to integers for sorting, the greatest close to 2**32."""
    top = float(weights.max(initial=0))
    return (weights * ((2**32 - 512) / top if top else 0.0)).astype(np.uint32)


class _Streaming:
    """The passes of `stream` over columns in visit order."""

    def __init__(
        self,
        columns: ColumnFile,
        visits: Visits,
        weights: Weighted,
        options: OwnerOptions,
        share: int,
        progress: Progress,
    ) -> None:
        self._columns, self._visits, self._edge = columns, visits, weights.edge
        self._options, self._share, self._progress = options, share, progress
        order = visits.order
        self._ranked = NodeWeights(weights.node[order], weights.edge[order], visits.both_ways)
        self._load = float(weights.node.sum(dtype=np.float64))
        self._weight = float((weights.edge * columns.degrees).sum(dtype=np.float64))

    def find(self) -> NDArray[np.uint16]:
        """The owner of each node, in visit order."""
        k, size = self._options.owners, self._edge.size
        clusters = _num_clusters(size, k)
        found = np.full(size, clusters, np.uint16)
        self._pass(_CLUSTER_PASSES, self._empty(clusters, _CLUSTER_SLACK, _CLUSTER_PRICE), found)
        by_id = np.empty(size, np.uint16)
        by_id[self._visits.order] = found
        table = weights_between(
            self._columns, self._edge, by_id, clusters, self._share, self._progress
        )
        loads = sum_by_owner(self._ranked.node, found, clusters)
        table += table.T
        found = put_together(
            table, loads, self._options, lambda: self._empty(k, self._options.balance, 1.0)
        )[found]
        balance = self._empty(k, self._options.balance, 1.0)
        balance.loads[:] = sum_by_owner(self._ranked.node, found, k)
        balance.sizes[:] = np.bincount(found, minlength=k)
        balance.prices[:] = balance.price * np.sqrt(balance.loads)
        self._pass(_OWNER_PASSES, balance, found)
        return found

    def _empty(self, k: int, slack: float, times: float) -> WeightedLoads:
        """`k` empty partitions with `times` FENNEL's price of loads."""
        price = fennel_price(k, self._weight, self._load)
        return WeightedLoads.empty(k, slack * self._load / k, times * price)

    def _pass(self, passes: int, balance: WeightedLoads, found: NDArray[np.uint16]) -> None:
        columns, no_edges = self._visits.columns, np.empty(0, np.uint32)
        for number in range(1, passes + 1):
            node, skip = 0, 0
            name = f"pass {number} of {passes} for {balance.loads.size}"
            with closing(scan_columns(columns, name, self._share, self._progress)) as pieces:
                for sources in chain(pieces, [no_edges]):  # the last one places nodes without edges
                    node, skip = place_weighted(
                        node, skip, columns.degrees, sources, self._ranked, found, balance
                    )
            assert node == found.size


def put_together(
    table: NDArray[np.float64],
    loads: NDArray[np.float64],
    options: OwnerOptions,
    empty: Callable[[], WeightedLoads],
) -> NDArray[np.uint16]:
    """The owner of each cluster, uint16 (clusters,): the best of several tries, by the weight over
    the cap, then by the weight of cross edges.

    table   float64 (clusters, clusters)   weight of the edges between each two, symmetric
    empty   makes the owners' empty loads
    """
    k, best = options.owners, (math.inf, math.inf)
    kept = np.zeros(loads.size, np.int64)
    for number in range(_TRIES):
        found, balance = np.full(loads.size, k, np.int64), empty()
        place_clusters(table, loads, _key(options, number), found, balance)
        cross = float(table[found[:, None] != found].sum())
        over = max(0.0, float(balance.loads.max()) - balance.cap)
        if (over, cross) < best:
            best, kept = (over, cross), found
    return kept.astype(np.uint16)


def group_partitions(
    table: NDArray[np.float64], loads: NDArray[np.float64], options: OwnerOptions
) -> NDArray[np.uint16]:
    """The owner of each partition, uint16 (partitions,), for equal loads and few cross edges.

    table   float64 (partitions, partitions)   weights of the edges between each two
    """
    k, load = options.owners, float(loads.sum())
    price, cap = fennel_price(k, float(table.sum()), load), _PARTITION_SLACK * load / k
    both = table + table.T
    found = put_together(both, loads, options, lambda: WeightedLoads.empty(k, cap, price))
    even_out(both, loads, found, k, cap)
    return found


def fennel_price(k: int, weight: float, load: float) -> float:
    """Price of a load, per root of the load; `weight`: of all edges, `load`: of all nodes."""
    return 1.5 * math.sqrt(k) * weight / load**1.5 if load else 0.0


# -- measuring ------------------------------------------------------------------------------------


def weights_between(
    columns: ColumnFile,
    edge: NDArray[np.float32],
    owner: NDArray[np.uint16],
    k: int,
    share: int,
    progress: Progress,
) -> NDArray[np.float64]:
    """Weights of all edges by the owners of target and source: float64 (k, k)."""
    table = np.zeros((k, k))
    node, skip = 0, 0
    with closing(scan_columns(columns, "weigh edges", share, progress)) as pieces:
        for sources in pieces:
            node, skip = weigh_between(node, skip, columns.degrees, sources, edge, owner, table)
    return table


def sum_by_owner(values: NDArray[Any], owner: NDArray[np.uint16], k: int) -> NDArray[np.float64]:
    """Sum of the values of each owner's nodes: float64 (k,)."""
    total = np.zeros(k)
    for first in range(0, owner.size, _STEP):
        piece = slice(first, first + _STEP)
        total += np.bincount(owner[piece], values[piece], k)
    return total


def measure(
    columns: ColumnFile,
    weights: Weighted,
    owner: NDArray[np.uint16],
    options: OwnerOptions,
    share: int,
    progress: Progress,
) -> dict[str, float]:
    """The share of edge weight that crosses, and the greatest loads of owners over the mean."""
    k = options.owners
    table = weights_between(columns, weights.edge, owner, k, share, progress)
    total = float(table.sum())
    found = {
        "cross": 1 - float(table.trace()) / total if total else 0.0,
        "imbalance": greatest_over_mean(sum_by_owner(weights.node, owner, k), 1.0),
        "node_imbalance": greatest_over_mean(np.bincount(owner, minlength=k), 1.0),
    }
    if weights.loaded is not None:
        found["row_imbalance"] = greatest_over_mean(sum_by_owner(weights.loaded, owner, k), 1.0)
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def _facts(
    options: OwnerOptions, found: tuple[Expansions, NDArray[np.uint32]] | None
) -> dict[str, Any]:
    """How a map was made, in plain values."""
    facts: dict[str, Any] = {
        "method": "partitions" if options.from_partitions else options.method,
        "weights": options.weights, "seed": options.seed,
        "presampled": None if found is None else msgspec.to_builtins(found[0]),
    }  # fmt: skip
    if facts["method"] == "stream":
        facts["balance"] = options.balance
    if facts["method"] == "metis":
        facts["scale"] = WHOLE
    return facts
