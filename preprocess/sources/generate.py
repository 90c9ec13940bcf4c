"""A labelled power-law graph, written in one stream: degree-corrected planted partition.

Node ranks r = 0, 1, ... have weights (r + 1)**-a and class r mod C; ids are a keyed permutation of
ranks, so that they reveal neither.  Both ends of an edge are drawn by weight in closed form (no
table); with probability `homophily` the second end is moved to the nearest rank of the first one's
class.  Features are a weak class centroid plus noise: a single node is hard to classify, its
neighborhood is not.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreExists
from blockstore.flags import flag
from blockstore.kernels.random import make_key, permute_range
from preprocess.errors import BadInput
from preprocess.files.npy import NpyWriter
from preprocess.ingest.contents import SPLITS
from preprocess.kernels.planted import make_pairs
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import Cost, PipelineRun, RunPlan, Stage, resumable
from preprocess.pipeline.work import sign

_PAIRS = 1 << 18  # edges of a chunk
_CHUNK_ITEMS = 1 << 21  # features of a chunk; the values depend on it and on the seed
_IDS = 1 << 20
_PIPELINE = 1  # increased when stages or their files change: older work folders are not resumed
_EDGES_KEY, _IDS_KEY, _SPLITS_KEY = range(3)


@dataclass(frozen=True, slots=True)
class GraphRecipe:
    panel: ClassVar = "Graph"
    num_nodes: int = flag(100_000, "number of nodes", "--nodes")
    degree: int = flag(16, "average in-degree; edges go both ways")
    num_features: int = flag(64, "float32 features a node", "--features")
    num_classes: int = flag(8, "number of classes", "--classes")
    train: float = flag(0.1, "share of nodes to train on")
    valid: float = flag(0.05, "share of nodes to validate on")
    test: float = flag(0.1, "share of nodes to test on")
    seed: int = flag(0, "the same seed gives the same graph")
    # standard deviation, against centroids of length `signal`
    noise: float = flag(1.0, "of the features; more is harder")
    homophily: float = 0.8
    exponent: float = 0.45  # a of the weights: degrees follow a power law of 1 + 1/a

    def check(self) -> None:
        """Raises BadInput if no graph can have these numbers."""
        for name, minimum in (("nodes", 1), ("features", 1), ("classes", 1), ("degree", 0)):
            found = getattr(self, name if name == "degree" else f"num_{name}")
            if found < minimum:
                raise BadInput.at(f"--{name}", found, f"{minimum} or more", "change it")
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

    def labels(self) -> NDArray[Any]:
        """Labels of all nodes, uint16 or uint32."""
        found = np.empty(self.num_nodes, np.uint16 if self.num_classes <= 2**16 else np.uint32)
        for ranks, ids in self.scrambled(_IDS_KEY, self.num_nodes):
            found[ids] = ranks % self.num_classes
        return found

    def scrambled(
        self, purpose: int, stop: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(places, nodes) of a keyed permutation of all nodes, up to place `stop`, in pieces."""
        for first in range(0, stop, _IDS):
            places = np.arange(first, min(first + _IDS, stop))
            nodes = np.empty(places.size, np.int64)
            permute_range(first, first + nodes.size, self.num_nodes, self.key(purpose), nodes)
            yield places, nodes

    @property
    def signal(self) -> float:
        """Length of the centroids: with noise 1, single nodes are classified at 30 to 50 %."""
        return 0.75 + 0.15 * math.log2(self.num_classes)

    @property
    def num_pairs(self) -> int:
        return self.num_nodes * self.degree // 2 if self.num_nodes > 1 else 0


@dataclass(eq=False)
class _Generation(PipelineRun):
    recipe: GraphRecipe
    labels: NDArray[Any]  # of all nodes, in a narrow dtype, kept in memory
    pool: ThreadPoolExecutor


def generate(folder: Path, recipe: GraphRecipe, progress: Progress) -> None:
    """Write the folder, in the plain layout.  Memory: 5 bytes a node and fixed buffers.

    Raises BadInput, StoreExists, OutOfSpace.  If the run is stopped, or the disk fills up, finished
    stages stay beside the folder, and the same call resumes after them.
    """
    recipe.check()
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreExists(f"{folder}: exists and is not empty; remove it, or choose another name")
    stages = _stages(recipe)
    signature = sign({"generate": _PIPELINE, "recipe": asdict(recipe)}, b"")
    with (
        resumable(folder, signature, progress, RunPlan.of(stages)) as work,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        run = _Generation(work, progress, recipe, recipe.labels(), pool)
        run.result.mkdir(exist_ok=True)
        run.execute(stages)
        with suppress(OSError):  # one that is not empty any more is refused below
            folder.rmdir()
        run.appear(folder)


def _stages(recipe: GraphRecipe) -> list[Stage[_Generation]]:
    nodes, splits = recipe.num_nodes, [f"{name}_idx.npy" for name in SPLITS]
    return [
        Stage("labels", Cost(0, 8 * nodes), _write_labels, arrays=["node_label.npy"]),
        Stage("edges", Cost(0, 32 * recipe.num_pairs), _write_edges, arrays=["edge_index.npy"]),
        Stage(
            "features", Cost(0, 4 * nodes * recipe.num_features), _write_features,
            arrays=["node_feat.npy"],
        ),
        Stage("splits", Cost(0, 8 * nodes), _write_splits, arrays=splits),
    ]  # fmt: skip


def _ahead(pool: ThreadPoolExecutor, make: Callable[[int], Any], numbers: range) -> Iterator[Any]:
    """make(n) for each number, in order, computed ahead by the pool."""
    coming: deque[Future[Any]] = deque()
    for number in numbers:
        coming.append(pool.submit(make, number))
        if len(coming) > 6:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def _write_labels(run: _Generation) -> None:
    with NpyWriter(run.result / "node_label.npy", (run.labels.size,), np.int64) as out:
        for first in range(0, run.labels.size, _IDS):
            out.append(run.labels[first : first + _IDS].astype(np.int64))


def _write_edges(run: _Generation) -> None:
    recipe, num_pairs = run.recipe, run.recipe.num_pairs
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
        NpyWriter(run.result / "edge_index.npy", (2, 2 * num_pairs), np.int64) as out,
        run.progress.stage("edges", 2 * num_pairs, "edges") as stage,
    ):
        done = 0
        for src, dst in _ahead(run.pool, make, range(0, num_pairs, _PAIRS)):
            out.put(done, src)
            out.put(2 * num_pairs + done, dst)
            done += src.size
            stage.advance(src.size)


def _write_features(run: _Generation) -> None:
    recipe, labels = run.recipe, run.labels
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
        NpyWriter(run.result / "node_feat.npy", (labels.size, shape[1]), np.float32) as out,
        run.progress.stage("features", total, "B") as stage,
    ):
        for rows in _ahead(run.pool, make, range(0, labels.size, step)):
            out.append(rows)
            stage.advance(rows.nbytes)


def _write_splits(run: _Generation) -> None:
    """Divide nodes in a keyed order into splits by their shares; each split is ascending."""
    recipe, size = run.recipe, run.recipe.num_nodes
    counts = [int(getattr(recipe, name) * size) for name in SPLITS]
    ends = np.cumsum(counts).astype(np.int64)
    owner = np.zeros(size, np.uint8)
    for places, nodes in recipe.scrambled(_SPLITS_KEY, int(ends[-1])):
        owner[nodes] = 1 + np.searchsorted(ends, places, "right")
    for number, name in enumerate(SPLITS, 1):
        with NpyWriter(run.result / f"{name}_idx.npy", None, np.int64) as out:
            for first in range(0, size, _IDS):
                out.append(first + np.flatnonzero(owner[first : first + _IDS] == number))
