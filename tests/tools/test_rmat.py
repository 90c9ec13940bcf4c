"""The R-MAT graph: how edges are spread, and that ids say nothing."""

import numpy as np
import pytest

from tools.rmat import main, parse_count

NODES, PAIRS = 5000, 40_000


def make(folder, *more):
    words = ["--nodes", "5K", "--pairs", str(PAIRS), "--features", "8", *more]
    main([str(folder), *words])
    return {p.stem: np.load(p) for p in folder.glob("*.npy")}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return make(tmp_path_factory.mktemp("rmat") / "graph")


def test_pairs_are_drawn_as_often_as_asked_for_and_are_no_loops(graph):
    src, dst = graph["edge_index"]
    assert src.size == PAIRS
    assert (src != dst).all()
    assert graph["edge_index"].min() >= 0
    assert graph["edge_index"].max() < NODES


def test_degrees_are_skewed_and_ids_say_nothing(graph):
    degree = np.bincount(graph["edge_index"].ravel(), minlength=NODES)
    top = np.sort(degree)[::-1][: NODES // 100]
    assert top.sum() > 0.1 * degree.sum()
    halves = degree[: NODES // 2].sum() / degree.sum()
    assert 0.3 < halves < 0.7
    assert abs(np.corrcoef(np.arange(NODES), degree)[0, 1]) < 0.1


def test_quadrants_have_their_shares(graph):
    """Labels are leading bits: half a graph whose edges lie within the first half .57 of the time.

    Nodes beyond 5000 of 8192 are drawn again, so the first half (of 8192) has more: at least .57,
    less than all; and within it src and dst are exchangeable.
    """
    src, dst = graph["node_label"][graph["edge_index"]] >> 3
    both = ((src == 0) & (dst == 0)).mean()
    across = ((src == 0) & (dst == 1)).mean(), ((src == 1) & (dst == 0)).mean()
    assert 0.57 < both < 0.9
    assert abs(across[0] - across[1]) < 0.02


def test_splits_are_of_connected_nodes_and_apart(graph):
    connected = np.unique(graph["edge_index"])
    parts = [graph[f"{name}_idx"] for name in ("train", "valid", "test")]
    assert parts[0].size == connected.size // 10
    joined = np.concatenate(parts)
    assert np.unique(joined).size == joined.size
    assert np.isin(joined, connected).all()


def test_features_tell_labels(graph):
    features, labels = graph["node_feat"], graph["node_label"]
    assert features.dtype == np.float32
    centres = {label: features[labels == label].mean(0) for label in np.unique(labels)}
    own = np.mean([np.square(f - centres[n]).sum() for f, n in zip(features, labels, strict=True)])
    assert own < np.square(features - features.mean(0)).sum(1).mean()


def test_a_seed_is_a_graph(graph, tmp_path):
    again, other = make(tmp_path / "again"), make(tmp_path / "other", "--seed", "1")
    for name, array in graph.items():
        assert np.array_equal(array, again[name]), name
    assert not np.array_equal(graph["node_label"], other["node_label"])


def test_a_folder_that_exists_is_left_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--nodes", "1K", "--pairs", "1000", "--features", "2"])
    assert "File exists" in capsys.readouterr().err


def test_counts_are_read():
    assert [parse_count(text) for text in ("12", "3K", "10M", "5m")] == [12, 3000, 10**7, 5 * 10**6]
