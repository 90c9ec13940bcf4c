"""The generated graph: a function of its recipe, power-law, and in need of neighbors."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockstore.errors import OutOfSpace, StoreExists
from preprocess.errors import BadInput
from preprocess.sources import generate as module
from preprocess.sources.generate import GraphRecipe, generate
from tests.preprocess.quiet import QUIET

RECIPE = GraphRecipe(6000, 12, 32, 8, train=0.3, valid=0.1, test=0.2, seed=3)
NAMES = ["edge_index", "node_feat", "node_label", "test_idx", "train_idx", "valid_idx"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The arrays of RECIPE."""
    folder = tmp_path_factory.mktemp("generated") / "graph"
    generate(folder, RECIPE, QUIET)
    assert sorted(p.name for p in folder.iterdir()) == [f"{n}.npy" for n in NAMES]
    return {name: np.load(folder / f"{name}.npy") for name in NAMES}


def made(folder: Path, recipe: GraphRecipe) -> bytes:
    """All bytes of a generated folder."""
    generate(folder, recipe, QUIET)
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def test_the_recipe_decides_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = replace(RECIPE, num_nodes=700)
    first = made(tmp_path / "a", recipe)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert made(tmp_path / "b", recipe) == first
    assert made(tmp_path / "c", replace(recipe, seed=4)) != first


def test_chunks_of_edges_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = replace(RECIPE, num_nodes=700)
    first = made(tmp_path / "a", recipe)
    monkeypatch.setattr(module, "_PAIRS", 100)
    monkeypatch.setattr(module, "_IDS", 64)
    assert made(tmp_path / "b", recipe) == first


def test_edges_go_both_ways_and_have_no_loops(graph: dict[str, np.ndarray]):
    src, dst = graph["edge_index"]
    assert src.size == 6000 * 12
    assert (src != dst).all()
    assert sorted(zip(src, dst, strict=True)) == sorted(zip(dst, src, strict=True))


def test_degrees_follow_a_power_law_and_ids_tell_nothing(graph: dict[str, np.ndarray]):
    """The largest of 6,000 weights r**-0.45 is 30 times the mean; 20 leaves room for chance."""
    degrees = np.bincount(graph["edge_index"][1], minlength=6000)
    assert degrees.max() > 20 * degrees.mean()
    assert np.median(degrees) < degrees.mean()
    halves = degrees.reshape(2, -1).sum(axis=1) / degrees.sum()
    assert abs(halves[0] - 0.5) < 0.1
    assert abs(np.corrcoef(np.arange(6000), graph["node_label"])[0, 1]) < 0.05


def test_splits_are_disjoint_ascending_and_of_their_shares(graph: dict[str, np.ndarray]):
    splits = [graph[f"{name}_idx"] for name in ("train", "valid", "test")]
    assert [s.size for s in splits] == [1800, 600, 1200]
    assert np.unique(np.concatenate(splits)).size == 3600
    assert all((np.diff(s) > 0).all() for s in splits)


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Of the nearest centroid, the centroids being known."""
    centroids = np.stack([features[labels == c].mean(axis=0) for c in range(8)])
    scores = features @ centroids.T - (centroids**2).sum(axis=1) / 2
    return float((scores.argmax(axis=1) == labels).mean())


def test_a_node_alone_is_hard_to_classify_and_its_neighborhood_is_not(
    graph: dict[str, np.ndarray],
):
    """The standard deviation of an accuracy over 6,000 nodes is 0.6 points."""
    features, labels = graph["node_feat"].astype(np.float64), graph["node_label"]
    src, dst = graph["edge_index"]
    degrees = np.maximum(np.bincount(dst, minlength=6000), 1)[:, None]
    near = np.zeros_like(features)
    np.add.at(near, dst, features[src])
    near /= degrees
    both = np.zeros_like(features)
    np.add.at(both, dst, near[src])
    assert 0.3 < accuracy(features, labels) < 0.5
    assert accuracy(near + both / degrees, labels) > 0.85


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nodes": 0}, "--nodes: found 0, expected 1"),
        ({"num_features": 0}, "--features"),
        ({"num_classes": 0}, "--classes"),
        ({"num_classes": 6001}, "--classes: found 6001, expected at most --nodes 6000"),
        ({"degree": -1}, "--degree"),
        ({"train": 0.8}, "shares of at most 1"),
        ({"noise": -1.0}, "nothing negative"),
        ({"seed": -1}, "nothing negative"),
    ],
)
def test_impossible_recipes_are_refused(tmp_path: Path, change: dict[str, int], words: str):
    with pytest.raises(BadInput, match=words):
        generate(tmp_path / "graph", replace(RECIPE, **change), QUIET)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", [GraphRecipe(1, 5, 1, 1), GraphRecipe(3, 0, 2, 3)])
def test_the_smallest_graphs(tmp_path: Path, recipe: GraphRecipe):
    generate(tmp_path / "graph", recipe, QUIET)
    assert np.load(tmp_path / "graph" / "edge_index.npy").shape == (2, 0)


def test_an_empty_folder_is_filled_another_is_refused(tmp_path: Path):
    recipe = GraphRecipe(20, 2, 2, 2)
    generate(tmp_path, recipe, QUIET)
    with pytest.raises(StoreExists, match="not empty"):
        generate(tmp_path, recipe, QUIET)
    with pytest.raises(StoreExists):
        generate(tmp_path / "node_feat.npy", recipe, QUIET)


def test_a_full_disk_leaves_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    generate(tmp_path / "whole", RECIPE, QUIET)
    write, left = os.pwrite, [5]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OutOfSpace, match=r"(node_feat|edge_index).*the same command goes on"):
            generate(tmp_path / "graph", RECIPE, QUIET)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".graph.work", "whole"]
    generate(tmp_path / "graph", RECIPE, QUIET)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph", "whole"]
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "graph" / path.name).read_bytes()


def test_a_disk_too_small_is_refused_early(tmp_path: Path):
    with pytest.raises(OutOfSpace, match=r"found .* free, expected"):
        generate(tmp_path / "graph", GraphRecipe(10**12, 100, 1000, 10), QUIET)
    assert list(tmp_path.iterdir()) == []
