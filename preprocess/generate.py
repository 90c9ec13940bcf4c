"""A labelled power-law graph, written in one stream: degree-corrected planted partition.

Node ranks r = 0, 1, ... have weights (r + 1)**-a and class r mod C; ids are a keyed scramble of
ranks, so that an id tells neither.  Both ends of an edge are drawn by weight in closed form (no
table); with probability `homophily` the second end is moved to the nearest rank of the first one's
class.  Features are the class's centroid, weak, in noise: a node alone is hard to classify, its
neighborhood is not.
"""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace, StoreExists
from blockstore.kernels.random import make_key
from blockstore.units import format_bytes
from preprocess.errors import BadInput
from preprocess.files.npy import NpyWriter
from preprocess.kernels.planted import assign_shares, label_ranks, make_pairs
from preprocess.progress import Progress

_PAIRS = 1 << 18  # a chunk of edges
_CHUNK_ITEMS = 1 << 21  # of features; with the seed it decides them
_IDS = 1 << 20
_EDGES_KEY, _IDS_KEY, _SPLITS_KEY = range(3)
SPLITS = ("train", "valid", "test")


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
    noise: float = 1.0  # standard deviation, against centroids of length `signal`
    homophily: float = 0.8
    exponent: float = 0.45  # a of the weights: degrees follow a power law of 1 + 1/a

    def check(self) -> None:
        """Raises BadInput."""
        for name, least in (("nodes", 1), ("features", 1), ("classes", 1), ("degree", 0)):
            found = getattr(self, name if name == "degree" else f"num_{name}")
            if found < least:
                raise BadInput.at(f"--{name}", found, f"{least} or more", "change it")
        if self.num_classes > self.num_nodes:
            raise BadInput.at(
                "--classes", self.num_classes, f"at most --nodes {self.num_nodes}", "change it"
            )
        shares = (self.train, self.valid, self.test)
        if min(shares) < 0 or sum(shares) > 1 or self.noise < 0 or self.seed < 0:
            raise BadInput.at(
                "--train --valid --test --noise --seed", f"{shares} {self.noise} {self.seed}",
                "shares of at most 1 in all, nothing negative", "change them",
            )  # fmt: skip

    def key(self, purpose: int) -> np.uint64:
        """Key of the draws for one purpose."""
        return np.uint64(make_key(self.seed, 0, 0, 0, purpose))

    @property
    def signal(self) -> float:
        """Length of the centroids: with noise 1 a node alone is told from others at 30 to 50 %."""
        return 0.75 + 0.15 * math.log2(self.num_classes)

    @property
    def num_pairs(self) -> int:
        """Undirected edges."""
        return self.num_nodes * self.degree // 2 if self.num_nodes > 1 else 0


def generate(folder: Path, recipe: GraphRecipe, progress: Progress) -> None:
    """Write the folder, in the plain layout.  Memory: 5 bytes a node and fixed buffers.

    Raises BadInput, StoreExists, OutOfSpace; nothing is left behind then.
    """
    recipe.check()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreExists(f"{folder}: exists and is not empty; remove it, or choose another name")
    parent = folder.absolute().parent
    _check_disk(parent, recipe)
    threads = len(os.sched_getaffinity(0))
    temporary = parent / f".{folder.name}.partial-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(threads) as pool:
            labels = _write_labels(temporary, recipe)
            _write_edges(temporary, recipe, pool, progress)
            _write_features(temporary, recipe, labels, pool, progress)
            _write_splits(temporary, recipe)
        temporary.rename(folder)  # also onto an empty folder
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_disk(parent: Path, recipe: GraphRecipe) -> None:
    while not parent.exists():
        parent = parent.parent
    need = 32 * recipe.num_pairs + recipe.num_nodes * (4 * recipe.num_features + 16)
    free = shutil.disk_usage(parent).free
    if need > free:
        raise OutOfSpace(
            f"{parent}: found {format_bytes(free)} free, expected {format_bytes(need)} for the "
            "graph; free some space, or choose another disk"
        )


def _ahead(pool: ThreadPoolExecutor, make: Callable[[int], Any], numbers: range) -> Iterator[Any]:
    """make(n) for each number, in order, some of them ahead of their use."""
    coming: deque[Future[Any]] = deque()
    for number in numbers:
        coming.append(pool.submit(make, number))
        if len(coming) > 6:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def _write_labels(folder: Path, recipe: GraphRecipe) -> NDArray[Any]:
    """Returns the labels, narrow."""
    size = recipe.num_nodes
    labels = np.empty(size, np.uint16 if recipe.num_classes <= 2**16 else np.uint32)
    label_ranks(0, size, size, recipe.num_classes, recipe.key(_IDS_KEY), labels)
    with NpyWriter(folder / "node_label.npy", (size,), np.int64) as out:
        for first in range(0, size, _IDS):
            out.append(labels[first : first + _IDS].astype(np.int64))
    return labels


def _write_edges(
    folder: Path, recipe: GraphRecipe, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    num_pairs = recipe.num_pairs
    key, id_key = recipe.key(_EDGES_KEY), recipe.key(_IDS_KEY)

    def make(first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size = 2 * min(_PAIRS, num_pairs - first)
        src, dst = np.empty(size, np.int64), np.empty(size, np.int64)
        make_pairs(
            first, recipe.num_nodes, recipe.num_classes, recipe.homophily, recipe.exponent, key,
            id_key, src, dst,
        )  # fmt: skip
        return src, dst

    with (
        NpyWriter(folder / "edge_index.npy", (2, 2 * num_pairs), np.int64) as out,
        progress.stage("edges", 2 * num_pairs, "edges") as stage,
    ):
        done = 0
        for src, dst in _ahead(pool, make, range(0, num_pairs, _PAIRS)):
            out.put(done, src)
            out.put(2 * num_pairs + done, dst)
            done += src.size
            stage.advance(src.size)


def _write_features(
    folder: Path,
    recipe: GraphRecipe,
    labels: NDArray[Any],
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    shape = (recipe.num_classes, recipe.num_features)
    centroids = np.random.Generator(np.random.Philox(key=recipe.seed)).standard_normal(shape)
    centroids *= recipe.signal / np.linalg.norm(centroids, axis=1, keepdims=True)
    weak, noise = centroids.astype(np.float32), np.float32(recipe.noise)
    step = max(1, _CHUNK_ITEMS // recipe.num_features)

    def make(first: int) -> NDArray[np.float32]:
        part = labels[first : first + step]
        draws = np.random.Generator(np.random.Philox(key=[recipe.seed, first + 1]))
        rows = draws.standard_normal((part.size, shape[1]), np.float32)
        rows *= noise
        rows += weak[part]
        return rows

    total = 4 * labels.size * recipe.num_features
    with (
        NpyWriter(folder / "node_feat.npy", (labels.size, shape[1]), np.float32) as out,
        progress.stage("features", total, "B") as stage,
    ):
        for rows in _ahead(pool, make, range(0, labels.size, step)):
            out.append(rows)
            stage.advance(rows.nbytes)


def _write_splits(folder: Path, recipe: GraphRecipe) -> None:
    """Nodes in a keyed order, cut into the shares; each split ascending."""
    size = recipe.num_nodes
    counts = [int(getattr(recipe, name) * size) for name in SPLITS]
    ends = np.cumsum(counts).astype(np.int64)
    owner = np.zeros(size, np.uint8)
    assign_shares(0, int(ends[-1]), size, recipe.key(_SPLITS_KEY), ends, owner)
    for number, name in enumerate(SPLITS, 1):
        with NpyWriter(folder / f"{name}_idx.npy", None, np.int64) as out:
            for first in range(0, size, _IDS):
                out.append(first + np.flatnonzero(owner[first : first + _IDS] == number))
