"""The R-MAT graph that results are quoted on, as a plain folder: `python -m tools.rmat FOLDER`.

Quadrants .57, .19, .19, .05; self-loops are drawn again; ids are scattered, so that their order
says nothing.  Ingest it with `--undirected`, which adds reverses and drops duplicates; the default
leaves 195 million edges then.  Labels are the quadrants of the first four levels, features a centre
of the label and noise; a tenth of the nodes that have an edge are to train on, a twentieth each to
validate and test on.
"""

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from numba import njit

from blockstore.kernels.random import draw_below, make_key, permute
from preprocess.files.npy import NpyWriter
from tools.command import parse

NODES, PAIRS, FEATURES = 10_000_000, 99_588_582, 128
_CHUNK = 4 << 20
_ROWS = 1 << 17
_LABEL_BITS = 4
_UNIT = 1 << 32
_A, _AB, _ABC = int(0.57 * _UNIT), int(0.76 * _UNIT), int(0.95 * _UNIT)


@njit(nogil=True, cache=True)
def draw_pairs(first, bits, num_nodes, key, id_key, src, dst):
    """Draw pairs `first`, `first + 1`, ... of scattered ids into `src` and `dst`, int32."""
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
    """labels[id] = the leading bits of the R-MAT node with this scattered id."""
    for node in range(num_nodes):
        labels[permute(node, num_nodes, id_key)] = node >> max(0, bits - _LABEL_BITS)


def generate(folder: Path, nodes: int, pairs: int, features: int, seed: int) -> None:
    """Write the folder, with a few bytes per node and one chunk of edges in memory.

    Raises FileExistsError.
    """
    key, id_key = (np.uint64(make_key(seed, part, 0, 0, 0)) for part in (0, 1))
    bits = max(1, (nodes - 1).bit_length())
    folder.mkdir(parents=True)
    has_edge = np.zeros(nodes, np.bool_)
    ends = np.empty((2, min(_CHUNK, pairs)), np.int32)
    with NpyWriter(folder / "edge_index.npy", (2, pairs), np.int32) as columns:
        for first in range(0, pairs, _CHUNK):
            src, dst = ends[:, : min(_CHUNK, pairs - first)]
            draw_pairs(first, bits, nodes, key, id_key, src, dst)
            columns.put(first, src)
            columns.put(pairs + first, dst)
            has_edge[src] = has_edge[dst] = True
    labels = np.empty(nodes, np.int64)
    label_nodes(bits, nodes, id_key, labels)
    np.save(folder / "node_label.npy", labels)
    centres = np.random.default_rng([seed, 2]).standard_normal((1 << _LABEL_BITS, features))
    with NpyWriter(folder / "node_feat.npy", (nodes, features), np.float32) as rows:
        for first in range(0, nodes, _ROWS):
            own = labels[first : first + _ROWS]
            noise = np.random.default_rng([seed, 3, first]).standard_normal(
                (own.size, features), np.float32
            )
            rows.append(noise + 0.5 * centres[own].astype(np.float32))
    connected = np.flatnonzero(has_edge)
    np.random.default_rng([seed, 4]).shuffle(connected)
    tenth = connected.size // 10
    cuts = (0, tenth, tenth * 3 // 2, 2 * tenth)
    for name, (low, high) in zip(("train", "valid", "test"), pairwise(cuts), strict=True):
        np.save(folder / f"{name}_idx.npy", np.sort(connected[low:high]))


def parse_count(text: str) -> int:
    """Parse a number with an optional suffix K (thousands) or M (millions).  Raises ValueError."""
    scale = {"K": 1_000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale > 1 else text) * scale


@dataclass(frozen=True)
class RmatOptions:
    folder: Path
    nodes: Annotated[int, parse_count] = NODES
    pairs: Annotated[int, parse_count, "that are drawn"] = PAIRS
    features: int = FEATURES
    seed: int = 0


def main(words: list[str]) -> None:
    given = parse(RmatOptions, words)
    try:
        generate(given.folder, given.nodes, given.pairs, given.features, given.seed)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main(sys.argv[1:])
