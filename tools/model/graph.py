"""The model's description of a graph: numbers of nodes by degrees and region of rows."""

from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import FORMAT_VERSION, Manifest, NodeType, Relation, RowArray, id_bits
from blockstore.store import Store, read_rows
from loaderd.memory.ledger import served_rows
from loaderd.sampling.hyperbatch.regions import region_rows, region_shift, rows_by_type
from preprocess.files.store import stored_blocks

_EXACT, _STEP = 16, 1.06  # degrees with a class each; ratio between further classes
_SCAN_BYTES = 4 << 20

Counts = NDArray[np.float64]


class Graph(NamedTuple):
    """A graph of one node type and relation.  A class has nodes of about the same degrees."""

    into: Counts  # (classes,) mean in-degree
    out: Counts  # (classes,) mean out-degree
    seeds: Counts  # (classes,) share of the nodes that are seeds
    nodes: Counts  # (regions, classes) nodes in each region of the row cache (adjacent rows);
    #   the sum over regions is the distribution of degrees
    undirected: bool  # each edge has its reverse
    inside: float = 0.0  # share of edges within a partition, leaving out those of hubs

    @property
    def sizes(self) -> Counts:
        """Nodes of each class."""
        found: Counts = self.nodes.sum(0)
        return found

    @property
    def num_edges(self) -> float:
        return float(self.sizes @ self.into)

    @property
    def num_seeds(self) -> float:
        return float(self.sizes @ self.seeds)


def class_of(degrees: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each degree: small ones have their own, larger ones share within 6 %."""
    large = np.log(np.maximum(degrees, _EXACT) / _EXACT) / np.log(_STEP)
    found: NDArray[np.int64] = np.minimum(degrees, _EXACT) + large.astype(np.int64)
    return found


def read_graph(store: Store, split: str) -> Graph:
    """The distribution of a store's degrees by region.  Reads its graph once.

    Raises ValueError: it has several node types or relations; CorruptBlock.
    """
    manifest = store.manifest
    if len(manifest.types) > 1 or len(manifest.relations) > 1:
        raise ValueError(f"{store.path}: the model knows graphs of one node type and one relation")
    node_type, relation = manifest.types[0], manifest.relations[0]
    into, out = (np.zeros(node_type.num_nodes, np.int64) for _ in range(2))
    parts, inside, counted = _partitions(store, node_type), 0.0, 0.0
    for targets, block in stored_blocks(store, relation, _SCAN_BYTES):
        header, here = block.header, block.degrees_here()
        into[header.first_node : header.first_node + here.size] += here
        into[header.first_node - 1] += header.num_carried
        if not manifest.undirected:
            out += np.bincount(block.sources, minlength=out.size)
        if parts is not None:
            ends = parts[targets], parts[block.sources]
            apart = (ends[0] >= 0) & (ends[1] >= 0)
            inside += float(np.count_nonzero(apart & (ends[0] == ends[1])))
            counted += float(np.count_nonzero(apart))
    place = read_rows(store, node_type.store_id)[read_rows(store, node_type.splits[split])]
    found = grouped(
        into, into if manifest.undirected else out, place.astype(np.int64), region_size(manifest),
        manifest.undirected,
    )  # fmt: skip
    return found._replace(inside=inside / max(1.0, counted))


def _partitions(store: Store, node_type: NodeType) -> NDArray[np.int16] | None:
    """The partition of each node, -1 for a hub; None: the store has no partitions."""
    if not node_type.partition_offsets_path:
        return None
    ends = store.partition_offsets(node_type).astype(np.int64)
    found: NDArray[np.int16] = np.repeat(
        np.arange(len(ends) - 1, dtype=np.int16), ends[1:] - ends[:-1]
    )
    if node_type.hubs is not None:
        found[read_rows(store, node_type.hubs)] = -1
    return found


def macro_graph(graph: Graph, manifest: Manifest, partitions: int) -> Graph:
    """The part of a graph inside some partitions and hubs (assumed to be the largest degrees)."""
    node = manifest.types[0]
    share, hubs = partitions / node.num_partitions, 0 if node.hubs is None else node.hubs.num_rows
    order = np.argsort(-graph.out)
    before = np.cumsum(graph.sizes[order]) - graph.sizes[order]
    hub = np.empty(order.size)  # share of hubs in each class
    hub[order] = np.clip((hubs - before) / np.maximum(graph.sizes[order], 1), 0, 1)
    held = hub + (1 - hub) * share
    of_hubs = float(graph.sizes @ (hub * graph.out)) / max(1.0, graph.num_edges)
    # share of the edges of a present node whose other end is present, too
    others = max(1, node.num_partitions - 1)
    near = graph.inside + (1 - graph.inside) * (partitions - 1) / others
    kept = of_hubs + (1 - of_hubs) * (hub * share + (1 - hub) * near)
    return graph._replace(
        into=graph.into * kept, out=graph.out * kept, nodes=graph.nodes * held,
        seeds=graph.seeds * share / np.maximum(held, 1e-12),
    )  # fmt: skip


def region_size(manifest: Manifest) -> int:
    """Number of rows in a region of the row cache."""
    return 1 << region_shift(rows_by_type(served_rows(manifest))[0])


def grouped(
    into: NDArray[np.int64],
    out: NDArray[np.int64],
    seeds: NDArray[np.int64],
    region: int,
    undirected: bool,
) -> Graph:
    """A `Graph` from the degrees of each node, in the order of rows, and the rows of seeds."""
    keys = class_of(into) * (1 << 20) + class_of(out)
    known, own = np.unique(keys, return_inverse=True)
    regions = -(-into.size // region)
    cell = np.arange(into.size) // region * known.size + own
    nodes = np.bincount(cell, minlength=regions * known.size).reshape(regions, known.size)
    sizes = nodes.sum(0)
    return Graph(
        np.bincount(own, into) / sizes, np.bincount(own, out) / sizes,
        np.bincount(own[seeds], minlength=known.size) / sizes, nodes.astype(float), undirected,
    )  # fmt: skip


class Described(NamedTuple):
    """A graph known only by moments: log-normal degrees, and every edge has its reverse."""

    name: str
    num_nodes: int
    mean_degree: float
    spread: float  # standard deviation of the logarithm of the degrees
    num_seeds: int
    row_shape: int
    dtype: str
    isolated: float = 0.0  # share of nodes without edges

    @property
    def manifest(self) -> Manifest:
        """A manifest of its store, sufficient for sizes."""
        n, edges = self.num_nodes, int(self.num_nodes * self.mean_degree)
        ids = "uint32" if n < 1 << 32 else "uint64"
        blocks = -(-(edges * id_bits(n) // 8 + 4 * n) // (1 << 20))
        array: Any = lambda path, dtype, *shape: RowArray(path, dtype, n, shape)  # noqa: E731
        node = NodeType(
            "node", 0, n, array("ids", ids), array("places", ids), array("y", "int64"),
            {"x": array("x", self.dtype, self.row_shape)},
            {"train": RowArray("train", "int64", self.num_seeds)},
        )  # fmt: skip
        relation = Relation("node", "to", "node", edges, blocks, "edges", "first_node")
        return Manifest(
            format=FORMAT_VERSION, block_bytes=1 << 20, id_dtype=ids, types=(node,),
            relations=(relation,), order="degree", undirected=True,
        )  # fmt: skip

    @property
    def graph(self) -> Graph:
        """Rows ordered by descending degree; seeds are drawn from nodes with edges."""
        connected = self.num_nodes * (1 - self.isolated)
        mean = self.mean_degree / (1 - self.isolated)
        # quantiles of the distribution, fine in the tail, where the edges are
        tail = np.concatenate([[0.0], np.geomspace(1 / connected, 1, 400)])
        share, middle = np.diff(tail), (tail[1:] + tail[:-1]) / 2
        normal = NormalDist()
        degrees = np.array([np.exp(-self.spread * normal.inv_cdf(m)) for m in middle])
        degrees *= mean / (share @ degrees)
        sizes = np.append(share * connected, self.num_nodes - connected)
        degrees = np.append(degrees, 0.0)
        seeds = np.where(degrees > 0, self.num_seeds / connected, 0.0)
        types = rows_by_type(served_rows(self.manifest))
        ends = np.cumsum(region_rows(types[0]))
        below = np.clip(ends[:, np.newaxis] - (np.cumsum(sizes) - sizes), 0, sizes)
        nodes = np.diff(below, axis=0, prepend=0)
        return Graph(degrees, degrees, seeds, nodes, True)
