"""PyG's own loops with one line changed: a tiny run over several types."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
typing = pytest.importorskip("torch_geometric.typing")

from tools import drop_in  # noqa: E402


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
def test_a_tiny_comparison(tmp_path):
    if not typing.WITH_PYG_LIB and not typing.WITH_TORCH_SPARSE:
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse")
    folder, rng = tmp_path / "graph", np.random.default_rng(0)
    folder.mkdir()
    labels = rng.integers(0, 3, 90)
    schema = {"node_types": {"paper": 90, "venue": 5}, "relations": ["paper|in|venue"]}
    (folder / "schema.json").write_text(json.dumps(schema))
    np.save(folder / "edge__paper__in__venue.npy", np.stack([np.arange(90), labels]))
    np.save(folder / "feat__paper.npy", np.eye(3, dtype="f4")[labels])
    np.save(folder / "label__paper.npy", labels)
    for name, ids in (("train", np.arange(60)), ("test", np.arange(60, 90))):
        np.save(folder / f"split__paper__{name}.npy", ids)
    words = [
        "--undirected",
        "--seeds",
        "2",
        "--epochs",
        "5",
        "--learning-rate",
        "0.05",
        "--hidden",
        "8",
        "--num-neighbors",
    ]
    out = tmp_path / "lines.jsonl"
    line = drop_in.main([str(folder), *words, "3", "3", "--batch-size", "20", "--out", str(out)])
    assert json.loads(out.read_text())["ours"] == line["ours"]
    assert min(line["ours"], line["pyg"]) > 60  # of 3 classes
    assert line["difference"] == pytest.approx(line["ours"] - line["pyg"], abs=2e-3)
