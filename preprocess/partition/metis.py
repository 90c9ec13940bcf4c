"""METIS, for comparison: the only module that knows pymetis.  It holds the whole graph."""

import importlib
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.partition.partition import PartitionOptions
from preprocess.pipeline.progress import Progress
from preprocess.stages.columns import ColumnFile

_EDGE_BYTES, _NODE_BYTES = 60, 200  # seen: 51 to 54 an edge in one direction, nodes included


def check_installed(settings: PartitionOptions | None) -> None:
    """Raises BadInput: METIS is asked for, and pymetis is not installed."""
    if settings is not None and settings.method == "metis" and find_spec("pymetis") is None:
        raise BadInput.at(
            "--partitioner", "metis without pymetis", "it to be installed",
            'pip install "blockstore[metis]"; gap needs nothing',
        )  # fmt: skip


def metis_bytes(columns: ColumnFile) -> int:
    """Memory that it takes, about: both directions of each edge, and coarser graphs of them."""
    return 2 * _EDGE_BYTES * columns.num_edges + _NODE_BYTES * columns.degrees.size


def metis_partition(
    columns: ColumnFile, num_partitions: int, progress: Progress
) -> NDArray[np.uint32]:
    """Edges count in both directions, once; loops not at all.

    Returns uint32 (num_nodes,): where nodes are no more than partitions, each has its own.
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
    starts, neighbors = both_ways(targets, sources, num_nodes)
    with progress.stage("METIS", num_nodes, "nodes") as stage:
        graph = pymetis.CSRAdjacency(adj_starts=starts, adjacent=neighbors)
        _, found = pymetis.part_graph(num_partitions, adjacency=graph)
        stage.advance(num_nodes)
    return np.asarray(found, np.uint32)


def both_ways(
    targets: NDArray[np.uint32], sources: NDArray[np.uint32], num_nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """CSR of the undirected graph without loops and parallel edges: (starts, neighbors), int64."""
    shift, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    ends = targets.astype(np.uint64), sources.astype(np.uint64)
    pairs = np.unique(np.concatenate([ends[0] << shift | ends[1], ends[1] << shift | ends[0]]))
    first = (pairs >> shift).astype(np.int64)
    second = (pairs & low).astype(np.int64)
    kept = first != second
    starts = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(first[kept], minlength=num_nodes), out=starts[1:])
    return starts, second[kept]
