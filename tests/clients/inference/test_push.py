"""Layers that are pushed: sums of neighbors, made as rows and graph are read beside each other."""

from io import StringIO

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.store import open_store  # noqa: E402
from clients.inference import layerwise, plan  # noqa: E402
from clients.inference.edges import Nodes, find_connected  # noqa: E402
from clients.models import LAYERS, RelationalModel  # noqa: E402
from preprocess.pipeline.progress import Progress  # noqa: E402
from tests.clients.inference.test_inference import (  # noqa: E402
    RELATIONS,
    by_target,
    close,
    infer,
    least,
    make_model,
    whole,
    whole_batch,
)
from tests.heterostores import random_hetero, with_reverses, write_hetero_store  # noqa: E402

KEY = ("node", "to", "node")


@pytest.mark.parametrize("name", ["full", "lonely"])
def test_shares_and_reverses_are_those_of_the_edges(request, name):
    made = request.getfixturevalue(name)
    store, nodes = open_store(made.store), made.x.shape[0]
    connected = find_connected(store, np.float64)
    assert connected.reverses == {KEY: KEY}
    degrees = np.bincount(made.edges[1], minlength=nodes)
    assert sorted(1 / connected.shares[KEY]) == pytest.approx(sorted(degrees[degrees > 0]))
    assert (connected.receives["node"] == Nodes(nodes)) == (name == "full")
    assert find_connected(store).shares == {}


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["full", "lonely"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float", 1e-5), ("double", 1e-10)])
def test_sums_equal_the_whole_graph_in_any_memory(
    request, tmp_path, monkeypatch, name, dtype, tolerance
):
    """In one pass; in slices through files, of several sizes; in slices from rows read again."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    made = request.getfixturevalue(name)
    model = getattr(make_model("sage", made.x.shape[1], 48, depth=3), dtype)()
    infer(model, made.store, tmp_path / "whole.npy")
    expected = whole(model, made.x, by_target(made.edges))
    close(np.load(tmp_path / "whole.npy"), expected, tolerance)
    some = find_connected(open_store(made.store)).receives["node"].num_rows
    column = some * (8 if dtype == "double" else 4)
    ways = set()
    for columns in (0, 10, 20, 30, 40, 44):
        out = tmp_path / f"{columns}.npy"
        mem = least(model, made.store, out) + columns * column
        result = infer(model, made.store, out, mem_bytes=mem)
        layer = result.plan.layers[0]
        ways.add((len(layer.slices) > 1, bool(layer.kept)))
        assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert ways >= {(True, False), (True, True)}


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("share", [0.55, 0.75, 1.1])  # of sums, or of what sources give
def test_a_graph_without_lonely_nodes_is_read_little_more_than_once(
    full, tmp_path, monkeypatch, kind, share
):
    """At most 1.1 times rows and graph, by the counter of the system, all that is read counted."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model = make_model(kind, num_hidden=12)
    given = 4000 * 4 * (12 + 4 * (kind == "gat"))
    mem = least(model, full.store, tmp_path / "y.npy") + int(share * given)
    result = infer(model, full.store, tmp_path / "y.npy", mem_bytes=mem)
    (relation,) = open_store(full.store).manifest.relations
    ends, *layers, _ = result.stages
    ahead = ends.read_bytes
    for stage, num_in, num_out in zip(layers, (24, 12), (12, 5), strict=True):
        ideal = 4000 * 4 * (num_in + num_out) + relation.num_blocks * (16 << 10)
        tables = 64 << 10  # manifest, checksums, /proc
        assert ahead + stage.read_bytes <= 1.1 * ideal + tables
        ahead = 0


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["sparse", "full"])
def test_a_layer_that_reads_much_more_says_so(request, tmp_path, name):
    model, made = make_model("sage", num_hidden=64), request.getfixturevalue(name)
    mem = least(model, made.store, tmp_path / "y.npy")
    for more in (0, 8 << 20):
        shown = StringIO()
        layerwise(
            model, made.store, tmp_path / f"{more}.npy", mem_bytes=mem + more,
            progress=Progress(shown),
        )  # fmt: skip
        lines = [line for line in shown.getvalue().splitlines() if "times its rows" in line]
        assert ("layer 1 of 2 will read" in "".join(lines)) == (more == 0), lines
        if more == 0:
            assert "; a larger --mem" in lines[0]
            assert ("ingested with --undirected, takes less" in lines[0]) == (name == "sparse")


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("columns", [None, 0, 12, 24])  # with room for them; None: for all
def test_relations_push_along_their_reverses(tmp_path, monkeypatch, columns):
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    nodes = {"a": 300, "b": 900, "c": 170}  # "c" has no features, not all of them have edges
    graph = with_reverses(
        random_hetero(
            np.random.default_rng(5), nodes, RELATIONS, 2, {"a": 7, "b": 3}, "b", long_degree=1500
        )
    )
    write_hetero_store(tmp_path / "store", graph, undirected=True)
    torch.manual_seed(1)
    widths = {"a": 7, "b": 3, "c": 0}
    model = RelationalModel(LAYERS["sage"], widths, list(graph.relations), 40, 4).eval()
    connected = find_connected(open_store(tmp_path / "store"), np.float32)
    assert connected.reverses["a", "to", "b"] == ("b", "rev_to", "a")
    assert connected.reverses["b", "rev_to", "a"] == ("a", "to", "b")
    assert connected.reverses["b", "with", "b"] == ("b", "with", "b")
    with torch.no_grad():
        expected = model(whole_batch(graph, "b"))
    infer(model, tmp_path / "store", tmp_path / "whole.npy")
    close(np.load(tmp_path / "whole.npy"), expected, 1e-5)
    if columns is not None:
        out = tmp_path / "y.npy"
        column = 4 * sum(t.num_rows for t in connected.receives.values())
        mem = least(model, tmp_path / "store", out) + columns * column
        result = infer(model, tmp_path / "store", out, mem_bytes=mem)
        assert len(result.plan.layers[0].slices) > 1
        assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
