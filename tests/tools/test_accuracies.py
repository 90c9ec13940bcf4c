"""Tools that compare accuracies, on tiny graphs: ways of each run once, and pairs are counted."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
typing = pytest.importorskip("torch_geometric.typing")

from tools import hop_accuracy, link_accuracy, macro_accuracy, pairs  # noqa: E402
from tools.bench.setup import GraphSize, make_graph  # noqa: E402

LINES = [
    {"way": way, "seed": seed, "accuracy": 50.0 + seed + gain, "steps": 3}
    for way, gains in (("theirs", (0.0, 0.0, 0.0)), ("ours", (1.0, 2.0, 3.0)))
    for seed, gain in enumerate(gains)
]


@pytest.fixture(scope="module")
def graph(folder):
    """1000 nodes in four classes, with splits."""
    return make_graph(folder, GraphSize(1000, 8, 8, 4))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_there_is_not_run_again(tmp_path):
    out = tmp_path / "lines"

    def runs(done):
        return (line for line in LINES if (line["way"], line["seed"]) not in done)

    settings = link_accuracy.Settings("folder")
    first = pairs.finish(out, settings, lambda done: list(runs(done))[:4], "theirs")
    assert pairs.finish(out, settings, runs, "theirs") != first
    assert [(x["way"], x["seed"]) for x in lines_of(out)] == [(x["way"], x["seed"]) for x in LINES]


def test_every_way_of_macro_batches(graph, tmp_path):
    out = tmp_path / "lines.jsonl"
    names = ["in memory", "random 1/8", "GAP + hubs + halo 0.3 1/16", "order of GAP"]
    words = ["--partitions", "16", "--epochs", "5", "--num-neighbors", "3", "2", "--hidden", "8"]
    words += ["--seeds", "1", "--batch-size", "20", "--jobs", "1", "--learning-rate", "0.03"]
    words += ["--dropout", "0", "--ways", *names]
    macro_accuracy.main([str(graph), *words, "--out", str(out)])
    found = lines_of(out)
    assert [x["way"] for x in found] == [*names[:3], "order of GAP 1/8"]
    assert all(40 < x["accuracy"] <= 100 for x in found)  # of four classes
    assert found[0]["steps"] < found[1]["steps"]


def test_models_on_hops(graph, tmp_path):
    out = tmp_path / "lines.jsonl"
    words = ["--hops", "1", "--epochs", "8", "--batch-size", "10", "--hidden", "8", "--seeds", "1"]
    words += ["--models", "sign", "--chunks", "5", "--jobs", "1"]
    hop_accuracy.main([str(graph), *words, "--out", str(out)])
    found = lines_of(tmp_path / "lines-sign.jsonl")
    assert [x["way"] for x in found] == ["sign, rows", "sign, chunks of 5"]
    assert all(40 < x["accuracy"] <= 100 for x in found)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
def test_links(tmp_path):
    if not typing.WITH_PYG_LIB and not typing.WITH_TORCH_SPARSE:
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse")
    rng = np.random.default_rng(0)
    source = rng.integers(0, 40, 600)
    edges = np.stack([source, 40 + (source // 4 * 4 + rng.integers(0, 4, 600))])  # ten groups
    lists = np.array_split(rng.permutation(600), [500])
    np.save(tmp_path / "edge_index.npy", edges)
    for name, chosen in zip(("train", "test"), lists, strict=True):
        np.save(tmp_path / f"{name}_edge.npy", chosen)
    words = ["--seeds", "1", "--steps", "40", "--batch-size", "64", "--hidden", "8"]
    words += ["--num-neighbors", "4", "3", "--learning-rate", "0.03", "--replace"]
    link_accuracy.main([str(tmp_path), *words, "--out", str(tmp_path / "lines")])
    found = lines_of(tmp_path / "lines")
    assert [x["way"] for x in found] == list(link_accuracy.WAYS)
    assert all(70 < x["accuracy"] <= 100 for x in found)  # half of them are random pairs
