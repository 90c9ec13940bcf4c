"""Layers that are pushed: sums of neighbors, made as rows and graph are read beside each other."""

from io import StringIO

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.store import open_store  # noqa: E402
from blockstore.writer import StoreWriter  # noqa: E402
from clients.inference import layerwise, plan  # noqa: E402
from clients.inference.by_source import sort_by_source, tile_bytes, tile_relations  # noqa: E402
from clients.inference.edges import Nodes, find_connected, whole_columns  # noqa: E402
from clients.inference.plan import Later  # noqa: E402
from clients.inference.rows import store_of  # noqa: E402
from clients.models import LAYERS, RelationalModel  # noqa: E402
from preprocess.pipeline.progress import Progress  # noqa: E402
from tests.clients.inference.conftest import make_graph  # noqa: E402
from tests.clients.inference.test_inference import (  # noqa: E402
    RELATIONS,
    by_target,
    close,
    infer,
    make_model,
    minimum,
    whole,
    whole_batch,
)
from tests.heterostores import random_hetero, with_reverses, write_hetero_store  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402

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


@pytest.mark.parametrize("tile_edges", [1 << 20, 7000, 1999])
def test_edges_sorted_by_source_are_those_of_the_store(ring, tmp_path, tile_edges):
    """Naive: a stable sort of all (source, target)."""
    store = open_store(ring.store)
    (t,), (relation,) = store.manifest.types, store.manifest.relations
    pieces = [(d.copy(), s.copy()) for d, s in whole_columns(store, relation, t)]
    degrees, sources = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    targets = np.repeat(np.arange(t.num_nodes), degrees)
    planned = tile_relations(relation, 0, tile_edges)
    assert len(planned) == -(-22_000 // tile_edges)
    with StoreWriter(tmp_path / "out", block_bytes=4 << 10) as out:
        made = sort_by_source(store, relation, planned, out, QUIET)
        types = store.manifest.types
        written = store_of(out)
        written.manifest = msgspec.structs.replace(
            written.manifest, types=types, relations=tuple(made), id_dtype=store.manifest.id_dtype
        )
        for i, tile in enumerate(made):
            span = slice(i * tile_edges, (i + 1) * tile_edges)
            order = np.lexsort((targets[span], sources[span]))
            pieces = [(d.copy(), s.copy()) for d, s in whole_columns(written, tile, t, 4 << 10)]
            found = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
            expected = np.bincount(sources[span], minlength=t.num_nodes)
            np.testing.assert_array_equal(found[0], expected)
            np.testing.assert_array_equal(found[1], targets[span][order])
    written_bytes = sum(r.num_blocks for r in made) * (4 << 10)
    assert written_bytes <= tile_bytes(store.manifest, relation, tile_edges)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["ring", "sparse"])
def test_tiles_change_no_byte(request, tmp_path, monkeypatch, name):
    """As if an edge took much memory while it is sorted; the last layer gives to few columns."""
    made, model = request.getfixturevalue(name), make_model("sage", depth=3)
    infer(model, made.store, tmp_path / "one.npy")
    mem = minimum(model, made.store, tmp_path / "many.npy")
    monkeypatch.setattr(plan, "_edge_bytes", lambda _manifest: 16 << 10)
    many = infer(model, made.store, tmp_path / "many.npy", mem_bytes=mem + (16 << 20))
    edges = open_store(made.store).manifest.relations[0].num_edges
    assert 5 < edges / many.plan.tile_edges <= plan.MAX_TILES
    assert (tmp_path / "many.npy").read_bytes() == (tmp_path / "one.npy").read_bytes()


def test_a_dense_graph_is_not_sorted(tmp_path):
    """To read it once more costs more than what targets give to themselves, in any memory."""
    rng = np.random.default_rng(7)
    for edges, pushed in ((40_000, False), (4000, True)):
        folder = tmp_path / str(edges)
        folder.mkdir()
        made = make_graph(folder, rng.integers(0, 400, (2, edges)), 400, 24)
        result = infer(make_model("sage"), made.store, folder / "y.npy")
        assert (result.plan.tile_edges > 0) == pushed
        close(
            np.load(folder / "y.npy"),
            whole(make_model("sage"), made.x, by_target(made.edges)),
            1e-5,
        )


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, "float", 1e-5) for name in ("full", "ring", "sparse")]
    + [("lonely", "double", 1e-10), pytest.param("lonely", "float", 1e-5, marks=pytest.mark.long)]
    + [
        pytest.param(n, "double", 1e-10, marks=pytest.mark.long) for n in ("full", "ring", "sparse")
    ],
)
def test_sums_equal_the_whole_graph_in_any_memory(
    request, tmp_path, monkeypatch, name, dtype, tolerance
):
    """In one pass; in slices through files, of several sizes; in slices from rows read again."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    made = request.getfixturevalue(name)
    model = getattr(make_model("sage", made.x.shape[1], 16, depth=3), dtype)()
    infer(model, made.store, tmp_path / "whole.npy")
    expected = whole(model, made.x, by_target(made.edges))
    close(np.load(tmp_path / "whole.npy"), expected, tolerance)
    some = find_connected(open_store(made.store)).receives["node"].num_rows
    column = some * (8 if dtype == "double" else 4)
    ways = set()
    for columns in (0, 6, 12):
        out = tmp_path / f"{columns}.npy"
        mem = minimum(model, made.store, out) + columns * column
        result = infer(model, made.store, out, mem_bytes=mem)
        layer = result.plan.layers[0]
        assert (len(layer.slices) > 1) == bool(layer.later)
        ways |= set(layer.later.values())
        assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert ways == {Later.AGAIN, Later.GIVEN}


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["full", "ring"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("share", [0.6, 0.75, 1.1])  # of sums, or of what sources give
def test_a_graph_without_lonely_nodes_is_read_little_more_than_once(
    request, tmp_path, monkeypatch, name, kind, share
):
    """At most 1.1 times rows and graph, by the counter of the system, all that is read counted."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model, made = make_model(kind, num_hidden=12), request.getfixturevalue(name)
    given = 4000 * 4 * (12 + 4 * (kind == "gat"))
    mem = minimum(model, made.store, tmp_path / "y.npy") + int(share * given)
    result = infer(model, made.store, tmp_path / "y.npy", mem_bytes=mem)
    (relation,) = open_store(made.store).manifest.relations
    *before, first, second, _ = result.stages
    assert len(before) == 1 + (name == "ring" and kind == "sage")
    layers, ahead = (first, second), sum(stage.read_bytes for stage in before)
    for stage, num_in, num_out in zip(layers, (24, 12), (12, 5), strict=True):
        ideal = 4000 * 4 * (num_in + num_out) + relation.num_blocks * (16 << 10)
        tables = 64 << 10  # manifest, checksums, /proc
        assert ahead + stage.read_bytes <= 1.1 * ideal + tables
        ahead = 0


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["sparse", "full"])
def test_a_layer_that_reads_much_more_says_so(request, tmp_path, name):
    model, made = make_model("sage", num_hidden=64), request.getfixturevalue(name)
    mem = minimum(model, made.store, tmp_path / "y.npy")
    for more in (0, 8 << 20):
        shown = StringIO()
        layerwise(
            model, made.store, tmp_path / f"{more}.npy", mem_bytes=mem + more,
            progress=Progress(shown),
        )  # fmt: skip
        lines = [line for line in shown.getvalue().splitlines() if "times its rows" in line]
        assert ("layer 1 of 2 will read" in "".join(lines)) == (more == 0), lines
        if more == 0:
            assert lines[0].endswith("; a larger --mem takes less")
        assert ("once for all layers" in shown.getvalue()) == (name == "sparse")


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("maximum", "undirected"),  # edges of a node: many have none, or few
    [(1, True), (1, False), (6, False), pytest.param(6, True, marks=pytest.mark.long)],
)
def test_relations_push_along_edges_by_source(tmp_path, monkeypatch, undirected, maximum):
    """In any memory; "c" has no features, and nothing leads to it without reverses."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    nodes = {"a": 300, "b": 900, "c": 170}
    graph = random_hetero(
        np.random.default_rng(5),
        nodes,
        RELATIONS,
        maximum,
        {"a": 70, "b": 3},
        "b",
        long_degree=1500,
    )
    graph = with_reverses(graph) if undirected else graph
    write_hetero_store(tmp_path / "store", graph, undirected=undirected)
    torch.manual_seed(1)
    widths = {"a": 70, "b": 3, "c": 0}
    model = RelationalModel(LAYERS["sage"], widths, list(graph.relations), 40, 4).eval()
    connected = find_connected(open_store(tmp_path / "store"), np.float32)
    if undirected:
        assert connected.reverses["a", "to", "b"] == ("b", "rev_to", "a")
        assert connected.reverses["b", "rev_to", "a"] == ("a", "to", "b")
        assert connected.reverses["b", "with", "b"] == ("b", "with", "b")
    with torch.no_grad():
        expected = model(whole_batch(graph, "b"))
    result = infer(model, tmp_path / "store", tmp_path / "whole.npy")
    assert (result.plan.tile_edges > 0) != undirected
    close(np.load(tmp_path / "whole.npy"), expected, 1e-5)
    ways, receive = set(), {r[2] for r in graph.relations}
    for columns in (0, 20 if undirected else 14):  # with room for them
        out = tmp_path / "y.npy"
        column = 4 * sum(connected.receives[name].num_rows for name in receive)
        mem = minimum(model, tmp_path / "store", out) + columns * column
        result = infer(model, tmp_path / "store", out, mem_bytes=mem)
        first = result.plan.layers[0]
        assert (len(first.slices) > 1) == bool(first.later)
        ways |= {(name, way) for name, way in first.later.items()}
        assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
        out.unlink()
    others = Later.ENTERED if undirected else Later.GIVEN  # of two relations, or one
    assert {("a", others), ("a", Later.AGAIN), ("b", Later.AGAIN), ("c", Later.AGAIN)} <= ways
    assert ("c", Later.GIVEN) not in ways  # no row of "c" is read


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("undirected", "share"),  # of sums, in memory
    [(True, 0.6), (False, 0.6), (True, 1.1)]
    + [
        pytest.param(*p, marks=pytest.mark.long)
        for p in ((True, 0.75), (False, 0.75), (False, 1.1))
    ],
)
def test_several_types_are_read_little_more_than_once(tmp_path, monkeypatch, undirected, share):
    """At most 1.1 times rows and graph, by the counter of the system, all that is read counted."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    nodes, widths = {"a": 6000, "b": 8000, "c": 4000}, {"a": 128, "b": 96, "c": 0}
    rng, relations = np.random.default_rng(5), [*RELATIONS[:3], ("c", "of", "a")]
    graph = random_hetero(rng, nodes, relations, 3, {"a": 128, "b": 96}, "b")
    graph = with_reverses(graph) if undirected else graph
    store = tmp_path / "store"
    write_hetero_store(store, graph, undirected=undirected)
    model = RelationalModel(LAYERS["sage"], widths, list(graph.relations), 64, 4).eval()
    receives = find_connected(open_store(store)).receives
    into = {r[2] for r in graph.relations}
    sums = 4 * 64 * sum(receives[name].num_rows for name in into)
    out = tmp_path / "y.npy"
    result = infer(model, store, out, mem_bytes=minimum(model, store, out) + int(share * sums))
    assert (len(result.plan.layers[0].slices) > 1) == (share < 1)
    blocks = sum(r.num_blocks for r in open_store(store).manifest.relations) * 4096
    # of blocks of one page, to look at heads is to read them whole: this is left out
    _, *before, first, second, _ = result.stages
    assert len(before) == (not undirected)
    rows = 4 * sum(nodes[t] * widths[t] for t in nodes)
    hidden = [4 * 64 * sum(nodes[t] for t in types) for types in (into, nodes)]
    ahead = sum(stage.read_bytes for stage in before)
    for stage, ideal in ((first, rows + hidden[0]), (second, 2 * hidden[0])):
        tables = 64 << 10  # manifest, checksums, /proc
        assert ahead + stage.read_bytes <= 1.1 * (ideal + blocks) + tables
        ahead = 0
