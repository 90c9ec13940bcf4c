"""The comparison with PyG's loader: its statistics, and a tiny run of it."""

import json
import statistics

import numpy as np
import pytest

pytest.importorskip("torch")
typing = pytest.importorskip("torch_geometric.typing")

from tools import accuracy  # noqa: E402


def test_differences_are_paired():
    pairs = [(80.0, 79.0), (60.0, 60.5), (70.0, 69.5), (90.0, 90.0)]
    line = accuracy.summarize(accuracy.Settings("folder"), pairs)
    error = statistics.stdev([1.0, -0.5, 0.5, 0.0]) / 2
    assert line["difference"] == 0.25
    assert line["standard_error"] == pytest.approx(error, abs=1e-3)
    low, high = line["interval_95"]
    assert (low + high) / 2 == pytest.approx(0.25, abs=1e-3)
    assert (high - low) / 2 == pytest.approx(3.18 * error, abs=2e-3)  # t of 3 degrees of freedom


def test_noise_is_added_to_the_features_alone(small_graph, tmp_path):
    accuracy.prepare(accuracy.Settings(str(small_graph), noise=2.0), tmp_path)
    clean, noisy = (np.load(f / "node_feat.npy") for f in (small_graph, tmp_path / "noisy"))
    assert (noisy - clean).std() == pytest.approx(2 * clean.std(), rel=0.05)
    assert (tmp_path / "noisy" / "edge_index.npy").resolve() == small_graph / "edge_index.npy"


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
def test_a_tiny_comparison(small_graph, tmp_path, capsys):
    if not typing.WITH_PYG_LIB and not typing.WITH_TORCH_SPARSE:
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse")
    options = ["--seeds", "2", "--epochs", "3", "--hidden", "16", "--num-neighbors", "5", "5"]
    out = tmp_path / "results.jsonl"
    line = accuracy.main([str(small_graph), *options, "--learning-rate", "0.01", "--out", str(out)])
    assert line["ours"] > 30  # of 5 classes
    assert line["pyg"] > 30
    assert (
        json.loads(capsys.readouterr().out)
        == json.loads(out.read_text())
        == json.loads(json.dumps(line))
    )


def test_one_pair_has_no_error():
    line = accuracy.summarize(accuracy.Settings("folder"), [(70.0, 69.5)])
    assert line["difference"] == 0.5
    assert "interval_95" not in line
