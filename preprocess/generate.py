"""A labelled power-law graph, written in one stream: degree-corrected planted partition.

Node ranks r = 0, 1, ... have weights (r + 1)**-a and class r mod C; ids are a keyed scramble of
ranks, so that an id tells neither.  Both ends of an edge are drawn by weight in closed form (no
table); with probability `homophily` the second end is moved to the nearest rank of the first one's
class.  Features are the class's centroid, weak, in unit noise: a node alone is hard to classify,
its neighborhood is not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blockstore.errors import StoreExists
from blockstore.kernels.random import draw_below, make_key, permute
from preprocess.errors import BadInput
from preprocess.npy import NpyWriter
from preprocess.progress import Progress

_PAIRS = 1 << 20  # a chunk of edges
_ROWS = 1 << 14  # a chunk of rows, and the unit of the features' generator
_UNIT = 1 << 53


@dataclass(frozen=True, slots=True)
class GraphRecipe:
    """What to generate."""

    num_nodes: int
    degree: int  # average in-degree; every edge is there in both directions
    num_features: int
    num_classes: int
    train: float = 0.1
    valid: float = 0.05
    test: float = 0.1
    seed: int = 0
    homophily: float = 0.8
    exponent: float = 0.45  # a of the weights: degrees follow a power law of 1 + 1/a
    signal: float = 1.5  # length of the centroids, in standard deviations of the noise

    def check(self) -> None:
        """Raises BadInput."""
        for name in ("num_nodes", "num_features", "num_classes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.degree < 0 or self.num_classes > self.num_nodes:
            raise BadInput(
                f"degree {self.degree}, {self.num_classes} classes of {self.num_nodes} nodes: "
                "expected a degree of 0 or more and no more classes than nodes"
            )
        if min(self.train, self.valid, self.test) < 0 or self.train + self.valid + self.test > 1:
            raise BadInput("train, valid and test are shares: expected 0 or more, at most 1 in all")


@njit(nogil=True, cache=True)
def _rank(key, pair, end, num_nodes, exponent):
    """A rank drawn by weight: inverse of the cumulated weights, r ~ u**(1 / (1 - a))."""
    u = (draw_below(key, pair, end, _UNIT) + 0.5) / _UNIT
    rank = np.int64(num_nodes * u ** (1.0 / (1.0 - exponent)))
    return min(rank, num_nodes - 1)


@njit(nogil=True, cache=True)
def make_pairs(first, count, num_nodes, classes, homophily, exponent, key, id_key, src, dst):
    """Pairs first .. first + count, each in both directions: src and dst int64 (2 * count,)."""
    for i in range(count):
        pair = first + i
        a = _rank(key, pair, 0, num_nodes, exponent)
        b = _rank(key, pair, 1, num_nodes, exponent)
        if draw_below(key, pair, 2, _UNIT) < homophily * _UNIT:
            b = b - b % classes + a % classes
            if b >= num_nodes:
                b -= classes
        if a == b:  # no self-loops: the next node of the class
            b = (a + classes) % num_nodes if a + classes < num_nodes else a % classes
        u, v = permute(a, num_nodes, id_key), permute(b, num_nodes, id_key)
        src[2 * i], dst[2 * i] = u, v
        src[2 * i + 1], dst[2 * i + 1] = v, u


@njit(nogil=True, cache=True)
def _make_inverse(num_nodes, classes, id_key, labels):
    """labels[id] = class of the rank that the id stands for."""
    for rank in range(num_nodes):
        labels[permute(rank, num_nodes, id_key)] = rank % classes


def generate(folder: Path, recipe: GraphRecipe, progress: Progress) -> None:
    """Write the folder, in the plain layout.  Memory: 10 bytes a node and fixed buffers.

    Raises BadInput, StoreExists.
    """
    recipe.check()
    if folder.exists() and any(folder.iterdir()):
        raise StoreExists(f"{folder}: holds files already; remove them, or choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    id_key = np.uint64(make_key(recipe.seed, 0, 0, 0, 1))
    labels = np.empty(recipe.num_nodes, np.uint16 if recipe.num_classes < 2**16 else np.uint32)
    _make_inverse(recipe.num_nodes, recipe.num_classes, id_key, labels)
    _write_edges(folder, recipe, id_key, progress)
    _write_features(folder, recipe, labels, progress)
    with NpyWriter(folder / "node_label.npy", labels.shape, np.int64) as out:
        for first in range(0, labels.size, _PAIRS):
            out.append(labels[first : first + _PAIRS].astype(np.int64))
    _write_splits(folder, recipe)


def _write_edges(folder: Path, recipe: GraphRecipe, id_key: np.uint64, progress: Progress) -> None:
    num_pairs = recipe.num_nodes * recipe.degree // 2 if recipe.num_nodes > 1 else 0
    key = np.uint64(make_key(recipe.seed, 0, 0, 0, 0))
    src, dst = np.empty(2 * _PAIRS, np.int64), np.empty(2 * _PAIRS, np.int64)
    with (
        NpyWriter(folder / "edge_index.npy", (2, 2 * num_pairs), np.int64) as out,
        progress.stage("edges", 2 * num_pairs, "edges") as stage,
    ):
        for first in range(0, num_pairs, _PAIRS):
            count = min(_PAIRS, num_pairs - first)
            make_pairs(
                first, count, recipe.num_nodes, recipe.num_classes, recipe.homophily,
                recipe.exponent, key, id_key, src, dst,
            )  # fmt: skip
            out.put(2 * first, src[: 2 * count])
            out.put(2 * (num_pairs + first), dst[: 2 * count])
            stage.advance(2 * count)


def _write_features(
    folder: Path, recipe: GraphRecipe, labels: NDArray[Any], progress: Progress
) -> None:
    shape = (recipe.num_classes, recipe.num_features)
    centroids = np.random.Generator(np.random.Philox(key=recipe.seed)).standard_normal(shape)
    centroids *= recipe.signal / np.linalg.norm(centroids, axis=1, keepdims=True)
    weak = centroids.astype(np.float32)
    total = 4 * labels.size * recipe.num_features
    with (
        NpyWriter(folder / "node_feat.npy", (labels.size, shape[1]), np.float32) as out,
        progress.stage("features", total, "B") as stage,
    ):
        for number, first in enumerate(range(0, labels.size, _ROWS)):
            part = labels[first : first + _ROWS]
            noise = np.random.Generator(np.random.Philox(key=[recipe.seed, number + 1]))
            rows = noise.standard_normal((part.size, shape[1]), np.float32)
            rows += weak[part]
            out.append(rows)
            stage.advance(rows.nbytes)


def _write_splits(folder: Path, recipe: GraphRecipe) -> None:
    """Nodes in a keyed order, cut into the shares."""
    key = np.uint64(make_key(recipe.seed, 0, 0, 0, 2))
    order = np.empty(recipe.num_nodes, np.uint32)
    _permutation(recipe.num_nodes, key, order)
    first = 0
    for name in ("train", "valid", "test"):
        count = round(getattr(recipe, name) * recipe.num_nodes)
        np.save(folder / f"{name}_idx.npy", np.sort(order[first : first + count]).astype(np.int64))
        first += count


@njit(nogil=True, cache=True)
def _permutation(size, key, out):
    for i in range(size):
        out[i] = permute(i, size, key)
