"""The R-MAT graph that results are quoted on, as a plain folder: `python -m tools.rmat FOLDER`.

Quadrants .57, .19, .19, .05; self-loops are drawn again; ids are scattered, so that their order
says nothing.  Ingest it with `--undirected`, which adds reverses and drops duplicates; `--edges`
are those that stay then.  Labels are the quadrants of the first four levels, features a centre of
the label and noise; a tenth of the nodes that have an edge are to train on, a twentieth each to
validate and test on.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blockstore.kernels.random import draw_below, make_key, permute
from preprocess.files.npy import NpyWriter
from tools.command import parse

NODES, EDGES, FEATURES = 10_000_000, 195_000_000, 128
_CHUNK = 4 << 20
_SAMPLE = 64  # one of so many edges is looked at to know how many differ
_MOST_DRAWS = 64  # for an edge, then so many do not differ
_ROWS = 1 << 17
_LABEL_BITS = 4
_UNIT = 1 << 32
_A, _AB, _ABC = int(0.57 * _UNIT), int(0.76 * _UNIT), int(0.95 * _UNIT)

Ids = NDArray[np.int32]


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
def sample_edges(src, dst, key, out):
    """Names of the edges, whichever way they go, whose hash says so; uint64 out.

    Returns their number.
    """
    found = 0
    for i in range(src.size):
        low, high = min(src[i], dst[i]), max(src[i], dst[i])
        name = np.uint64(low) << np.uint64(32) | np.uint64(high)
        if draw_below(key, name, 0, _SAMPLE) == 0:
            out[found] = name
            found += 1
    return found


@njit(nogil=True, cache=True)
def label_nodes(bits, num_nodes, id_key, labels):
    """labels[id] = the leading bits of the node that the id stands for."""
    for node in range(num_nodes):
        labels[permute(node, num_nodes, id_key)] = node >> max(0, bits - _LABEL_BITS)


class Draws:
    """Pairs of a seed, in pieces, alike whenever they are drawn."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.nodes, self.bits = nodes, max(1, (nodes - 1).bit_length())
        self._key = np.uint64(make_key(seed, 0, 0, 0, 0))
        self.id_key = np.uint64(make_key(seed, 1, 0, 0, 0))
        self._src, self._dst = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)

    def pieces(self, pairs: int, piece: int) -> Iterator[tuple[int, Ids, Ids]]:
        """(first, src, dst) of pairs 0 to `pairs`, valid until the next step."""
        for first in range(0, pairs, piece):
            count = min(piece, pairs - first)
            src, dst = self._src[:count], self._dst[:count]
            draw_pairs(first, self.bits, self.nodes, self._key, self.id_key, src, dst)
            yield first, src, dst

    def count_for(self, edges: int) -> int:
        """How many pairs it takes until about `edges` are left, reverses added, duplicates dropped.

        Raises ValueError: the graph does not hold so many.
        """
        seen, names = np.empty(0, np.uint64), np.empty(_CHUNK, np.uint64)
        piece = max(1, min(_CHUNK, edges // 16))
        for first, src, dst in self.pieces(_MOST_DRAWS * edges, piece):
            found = sample_edges(src, dst, self._key, names)
            before, seen = seen.size, np.union1d(seen, names[:found])
            if (left := edges - 2 * _SAMPLE * before) <= 2 * _SAMPLE * (seen.size - before):
                return first + src.size * left // (2 * _SAMPLE * (seen.size - before))
        raise ValueError(f"--edges {edges}: {self.nodes} nodes have not so many; ask for fewer")


def generate(folder: Path, nodes: int, edges: int, features: int, seed: int) -> None:
    """Write the folder; a few bytes a node and a chunk of edges in memory.

    Raises ValueError: more edges than the graph holds; FileExistsError.
    """
    draws = Draws(nodes, seed)
    pairs = draws.count_for(edges)
    folder.mkdir(parents=True)
    bits, id_key = draws.bits, draws.id_key
    has_edge = np.zeros(nodes, np.bool_)
    with NpyWriter(folder / "edge_index.npy", (2, pairs), np.int32) as columns:
        for first, src, dst in draws.pieces(pairs, _CHUNK):
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
    cuts = {
        "train": (0, tenth),
        "valid": (tenth, tenth * 3 // 2),
        "test": (tenth * 3 // 2, 2 * tenth),
    }
    for name, (low, high) in cuts.items():
        np.save(folder / f"{name}_idx.npy", np.sort(connected[low:high]))


def parse_count(text: str) -> int:
    """A number, of thousands or millions where K or M follow.  Raises ValueError."""
    scale = {"K": 1_000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale > 1 else text) * scale


@dataclass(frozen=True)
class Options:
    folder: Path
    nodes: Annotated[int, parse_count] = NODES
    edges: Annotated[int, parse_count, "stored, both ways"] = EDGES
    features: int = FEATURES
    seed: int = 0


def main(words: list[str]) -> None:
    given = parse(Options, words, __doc__, "tools.rmat")
    try:
        generate(given.folder, given.nodes, given.edges, given.features, given.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main(sys.argv[1:])
