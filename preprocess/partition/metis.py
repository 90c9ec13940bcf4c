"""METIS, for comparison: the only module that uses pymetis.  It holds the whole graph in memory.

METIS adds up integer weights in 32 bits, and does not report overflows.  So the weights of all
nodes are scaled to a sum of 2**30, and so are those of all edges, each at least 1.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.order import distinct
from preprocess.errors import BadInput
from preprocess.pipeline.progress import Progress
from preprocess.stages.columns import ColumnFile

_EDGE_BYTES, _NODE_BYTES = 60, 200  # measured: 51 to 54 an edge in one direction, with nodes
_WEIGHT_BYTES = 48  # in addition, an edge in one direction, while weights of equal ones are added
WHOLE = 1 << 30  # sum of the weights of all nodes, and of all edges in both directions


def check_installed(method: str) -> None:
    """Raises BadInput if `method` is METIS, and pymetis is not installed."""
    if method == "metis" and find_spec("pymetis") is None:
        raise BadInput.at(
            "--partitioner", "metis without pymetis", "it to be installed",
            'pip install "blockstore[metis]"; others need nothing',
        )  # fmt: skip


def metis_bytes(columns: ColumnFile, weighted: bool = False) -> int:
    """Approximate memory: both directions of each edge, and the coarsened graphs."""
    edge = _EDGE_BYTES + weighted * _WEIGHT_BYTES
    return 2 * edge * columns.num_edges + _NODE_BYTES * columns.degrees.size


def metis_partition(
    columns: ColumnFile,
    num_partitions: int,
    progress: Progress,
    weights: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> NDArray[np.uint32]:
    """Partition the undirected graph: parallel edges count once, or with their weights; no loops.

    weights   float32 (num_nodes,) each: of the nodes, and of each in-edge of a node

    Returns uint32 (num_nodes,); if there are no more nodes than partitions, each has its own.
    Raises BadInput: too many edges for weights.
    """
    pymetis = importlib.import_module("pymetis")
    num_nodes = columns.degrees.size
    if num_nodes <= num_partitions:
        return np.arange(num_nodes, dtype=np.uint32)
    sources = np.empty(columns.num_edges, np.uint32)
    done = 0
    for piece in columns.read(0, columns.num_edges, 1 << 20):
        sources[done : done + piece.size] = piece
        done += piece.size
    targets = np.repeat(np.arange(num_nodes, dtype=np.uint32), columns.degrees)
    edge_weights = None if weights is None else weights[1]
    starts, neighbors, sums = both_ways(targets, sources, num_nodes, edge_weights)
    scaled = dict[str, NDArray[np.int64]]()
    if weights is not None:
        if sums.size > WHOLE:
            raise BadInput.at(
                "--partitioner metis", f"{sums.size:,} edges both ways", f"{WHOLE:,} at most",
                "take stream",
            )  # fmt: skip
        scaled["vweights"] = _scaled(weights[0], 0)
        scaled["eweights"] = _scaled(sums, 1)
    with progress.stage("METIS", num_nodes, "nodes") as stage:
        graph = pymetis.CSRAdjacency(adj_starts=starts, adjacent=neighbors)
        _, found = pymetis.part_graph(num_partitions, adjacency=graph, **scaled)
        stage.advance(num_nodes)
    return np.asarray(found, np.uint32)


def _scaled(weights: NDArray[Any], minimum: int) -> NDArray[np.int64]:
    """Integers of at least `minimum`, with a sum of about WHOLE, and at most twice that."""
    total = float(weights.sum(dtype=np.float64))
    found = np.rint(weights * (WHOLE / total if total else 0.0)).astype(np.int64)
    return np.maximum(found, minimum)


def both_ways(
    targets: NDArray[np.uint32],
    sources: NDArray[np.uint32],
    num_nodes: int,
    weights: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """CSR of the undirected graph without loops and parallel edges: (starts, neighbors, sums).

    weights   float32 (num_nodes,)   of each in-edge of a node

    Starts and neighbors are int64.  Sums, float64, add the weights of all edges in either direction
    between a node and its neighbor; they are empty without weights.
    """
    shift, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    ends = targets.astype(np.uint64), sources.astype(np.uint64)
    pairs = np.concatenate([ends[0] << shift | ends[1], ends[1] << shift | ends[0]])
    del ends
    sums: NDArray[Any] = np.empty(0)
    if weights is None:
        pairs = distinct(pairs)
    else:
        pairs, inverse = np.unique(pairs, return_inverse=True)
        sums = np.bincount(inverse, np.tile(weights[targets], 2), pairs.size)
    first = (pairs >> shift).astype(np.int64)
    second = (pairs & low).astype(np.int64)
    kept = first != second
    starts = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(first[kept], minlength=num_nodes), out=starts[1:])
    return starts, second[kept], sums[kept] if sums.size else sums
