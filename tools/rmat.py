"""The R-MAT graph that results are quoted on, as a plain folder: `python -m tools.rmat FOLDER`.

Quadrants .57, .19, .19, .05; self-loops are drawn again; ids are scattered, so that their order
says nothing.  Ingest it with `--undirected`, which adds reverses and drops duplicates.  Labels are
the quadrants of the first four levels, features a centre of the label and noise; a tenth of the
nodes that have an edge are to train on, a twentieth each to validate and test on.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numba import njit
from numpy.lib.format import open_memmap

from blockstore.kernels.random import draw_below, make_key, permute

PAIRS, NODES, FEATURES = 100_000_000, 10_000_000, 128
_CHUNK = 4 << 20
_ROWS = 1 << 17
_LABEL_BITS = 4
_UNIT = 1 << 32
_A, _AB, _ABC = int(0.57 * _UNIT), int(0.76 * _UNIT), int(0.95 * _UNIT)


@njit(nogil=True, cache=True)
def draw_pairs(first, bits, num_nodes, key, id_key, src, dst):
    """Pairs `first` and after, by scattered ids; int32 out."""
    for i in range(src.size):
        attempt = 0
        while True:
            u, v = np.int64(0), np.int64(0)
            for level in range(bits):
                r = draw_below(key, first + i, attempt * bits + level, _UNIT)
                u, v = 2 * u + (r >= _AB), 2 * v + ((r >= _A) & (r < _AB) | (r >= _ABC))
            attempt += 1
            if u != v and u < num_nodes and v < num_nodes:
                break
        src[i], dst[i] = permute(u, num_nodes, id_key), permute(v, num_nodes, id_key)


@njit(nogil=True, cache=True)
def label_nodes(bits, num_nodes, id_key, labels):
    """labels[id] = the leading bits of the node that the id stands for."""
    for node in range(num_nodes):
        labels[permute(node, num_nodes, id_key)] = node >> max(0, bits - _LABEL_BITS)


def generate(folder: Path, nodes: int, pairs: int, features: int, seed: int) -> None:
    """Write the folder; a few bytes a node and a chunk of edges in memory."""
    folder.mkdir(parents=True)
    bits = max(1, (nodes - 1).bit_length())
    key, id_key = np.uint64(make_key(seed, 0, 0, 0, 0)), np.uint64(make_key(seed, 1, 0, 0, 0))
    edges = open_memmap(folder / "edge_index.npy", "w+", np.int32, (2, pairs))
    has_edge = np.zeros(nodes, np.bool_)
    src, dst = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    for first in range(0, pairs, _CHUNK):
        count = min(_CHUNK, pairs - first)
        draw_pairs(first, bits, nodes, key, id_key, src[:count], dst[:count])
        edges[0, first : first + count], edges[1, first : first + count] = src[:count], dst[:count]
        has_edge[src[:count]] = has_edge[dst[:count]] = True
    edges.flush()
    labels = np.empty(nodes, np.int64)
    label_nodes(bits, nodes, id_key, labels)
    np.save(folder / "node_label.npy", labels)
    centres = np.random.default_rng([seed, 2]).standard_normal((1 << _LABEL_BITS, features))
    rows = open_memmap(folder / "node_feat.npy", "w+", np.float32, (nodes, features))
    for first in range(0, nodes, _ROWS):
        last = min(first + _ROWS, nodes)
        noise = np.random.default_rng([seed, 3, first]).standard_normal(
            (last - first, features), np.float32
        )
        rows[first:last] = noise + 0.5 * centres[labels[first:last]].astype(np.float32)
    rows.flush()
    connected = np.flatnonzero(has_edge)
    np.random.default_rng([seed, 4]).shuffle(connected)
    tenth = connected.size // 10
    cuts = {
        "train": (0, tenth),
        "valid": (tenth, tenth * 3 // 2),
        "test": (tenth * 3 // 2, 2 * tenth),
    }
    for name, (low, high) in cuts.items():
        np.save(folder / f"{name}_idx.npy", np.sort(connected[low:high]))


def main(words: list[str]) -> None:
    """Generate a graph."""
    parser = argparse.ArgumentParser(prog="tools.rmat", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="drawn; fewer edges stay, twice")
    parser.add_argument("--features", type=int, default=FEATURES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    generate(given.folder, given.nodes, given.pairs, given.features, given.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
