"""Scripts of PyG's kind, moved over by a few changed lines."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import NoDaemon  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.later import Later  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402

pyg, models = Later("clients.pyg"), Later("torch_geometric.nn")
REDDIT = Path(__file__).parent / "scripts/reddit.py"
CHANGES = {
    "from torch_geometric.datasets import Reddit": "from clients.pyg import StoreDataset",
    "from torch_geometric.loader import NeighborLoader": "from clients.pyg import NeighborLoader",
    "dataset = Reddit(path)": "dataset = StoreDataset(path)",
}


@pytest.fixture(scope="module")
def served(small_graph: Path, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("scripts") / "store"
    ingest(PlainSource(small_graph), store, IngestOptions(block_bytes=16 << 10), QUIET)
    with daemon(store, "32M", 2) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def graph(small_graph: Path) -> dict[str, Any]:
    names = ("edge_index", "node_feat", "node_label", "train_idx", "valid_idx", "test_idx")
    return {name: torch.from_numpy(np.load(small_graph / f"{name}.npy")) for name in names}


def mask_of(ids: Any) -> Any:
    return torch.zeros(4000, dtype=torch.bool).index_fill(0, ids, True)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_the_reddit_script_moves_with_three_lines(served, graph, monkeypatch, capsys):
    """Evaluation by inference over all nodes included, which equals the model on the whole graph;
    the accuracy is that of the whole graph's too."""
    lines = REDDIT.read_text().splitlines()
    moved = [CHANGES.get(line, line) for line in lines]
    assert sum(a != b for a, b in zip(lines, moved, strict=True)) == len(CHANGES) == 3
    monkeypatch.setattr("sys.argv", ["reddit.py", served])
    assert pyg.NeighborLoader is not models.SAGEConv  # imported without PyG's own warnings
    names: dict[str, Any] = {"__name__": "reddit"}
    exec(compile("\n".join(moved), "reddit.py", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said[:5]] == [f"Epoch 0{e}" for e in range(1, 6)]
    model, data = names["model"], names["data"]
    assert torch.equal(data.x, graph["node_feat"])
    assert torch.equal(data.y, graph["node_label"])
    for name, split in (("train", "train"), ("val", "valid"), ("test", "test")):
        assert torch.equal(getattr(data, f"{name}_mask"), mask_of(graph[f"{split}_idx"]))
    with torch.no_grad():
        whole = model(graph["node_feat"], graph["edge_index"])
    found = model.inference(data.x, names["subgraph_loader"])
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    tested = graph["test_idx"]
    right = (whole.argmax(1) == graph["node_label"])[tested].float().mean()
    assert float(said[5].rpartition(" ")[2]) == pytest.approx(float(right), abs=0.005)
    assert right > 0.5  # of 5 classes
    # functions and these names refer to each other: workers that a collection of cycles finds are
    # not told to end, and torch waits 5 s for each
    names.clear()


@pytest.mark.parametrize("kind", ["GraphSAGE", "GAT"])
def test_inference_of_pygs_own_models_takes_the_loader(served, graph, kind):
    model = getattr(models, kind)(24, 8, 2, 5).eval()
    loader = pyg.NeighborLoader(served, [-1], input_nodes=None, batch_size=500)
    assert len(loader.dataset) == loader.data.num_nodes == 4000
    assert len(loader) == 8
    with torch.no_grad():
        whole = model(graph["node_feat"], graph["edge_index"])
    for cache in (False, True):
        torch.testing.assert_close(
            model.inference(loader, cache=cache), whole, rtol=1e-4, atol=1e-4
        )
    loader.dataset.close()


def test_what_the_data_has_not_is_told_in_a_line(served):
    data = pyg.StoreDataset(served)[0]
    assert (data.num_features, data.num_classes, data.num_nodes) == (24, 5, 4000)
    for name, says in (
        ("edge_index", "edges stay in the store"),
        ("dev_mask", "has train_mask, valid_mask, test_mask"),
        ("z", "has x, y, train_mask"),
    ):
        with pytest.raises(AttributeError, match=says) as caught:
            getattr(data, name)
        assert "\n" not in str(caught.value)
    kept = data.x
    assert data.x is kept
    del data.x
    assert torch.equal(data.x, kept)
    whole = next(iter(NeighborDataset(served, "all", [1], 4000, shuffle=False)))
    assert torch.equal(whole.y, data.to("cpu").y)


def test_a_loader_waits_for_its_first_daemon(tmp_path):
    """As datasets do: trainers and daemon may be started in any order."""
    gone, begun = f"ipc://{tmp_path}/none.sock", time.monotonic()
    with pytest.raises(NoDaemon, match="start one with: loaderd serve"):
        pyg.NeighborLoader(gone, [3], reconnect_s=0.4)
    assert time.monotonic() - begun > 0.3
