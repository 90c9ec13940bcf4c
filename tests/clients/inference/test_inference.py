"""Inference in pieces against the model over the whole graph in memory; kills; refusals."""

import hashlib
import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")

from blockstore.errors import BudgetTooSmall, OutOfSpace, StoreError, StoreExists  # noqa: E402
from blockstore.store import open_store, read_rows  # noqa: E402
from blockstore.verify import verify_store  # noqa: E402
from clients.inference import layerwise, plan  # noqa: E402
from clients.inference.edges import whole_columns  # noqa: E402
from clients.inference.model import load_model  # noqa: E402
from clients.models import LAYERS, GraphSage, Layered, RelationalModel  # noqa: E402
from clients.torch import HeteroBatch  # noqa: E402
from clients.train import Classes  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.pipeline.work import WorkFolder  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402
from tests.processes import run_main  # noqa: E402
from tests.stores import write_store  # noqa: E402

GIB = 1 << 30


def make_model(kind, num_in=24, num_hidden=16, num_out=5, depth=2):
    torch.manual_seed(3)
    return Layered(LAYERS[kind], num_in, num_hidden, num_out, depth)


def by_target(edge_index):
    """Edges in the order of their targets, as the model's layers have them."""
    edges = torch.from_numpy(np.asarray(edge_index, np.int64))
    return edges[:, torch.argsort(edges[1], stable=True)]


def whole(model, x, edge_index):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(x).to(next(model.parameters()).dtype), edge_index)


def infer(model, store, out, **options):
    return layerwise(model, store, out, progress=QUIET, **options)


def close(found, expected, tolerance):
    scale = max(1.0, float(expected.abs().max()))
    assert float((torch.from_numpy(found) - expected).abs().max()) <= tolerance * scale


def minimum(model, store, out):
    with pytest.raises(BudgetTooSmall) as refused:
        infer(model, store, out, mem_bytes=1)
    return refused.value.min_bytes


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_equals_the_whole_graph(graph, tmp_path, kind, depth):
    model = make_model(kind, depth=depth)
    result = infer(model, graph.store, tmp_path / "y.npy")
    assert (result.num_rows, result.num_out) == (4000, 5)
    found = np.load(tmp_path / "y.npy")
    assert found.dtype == np.float32
    close(found, whole(model, graph.node_feat, by_target(graph.edge_index)), 1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_equals_the_whole_graph_in_float64(graph, tmp_path, kind):
    model = make_model(kind).double()
    infer(model, graph.store, tmp_path / "y.npy")
    found = np.load(tmp_path / "y.npy")
    assert found.dtype == np.float64
    close(found, whole(model, graph.node_feat, by_target(graph.edge_index)), 1e-10)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", LAYERS)
def test_memory_changes_no_byte(graph, tmp_path, kind):
    model = make_model(kind, num_hidden=64)
    much = infer(model, graph.store, tmp_path / "much.npy")
    mem = minimum(model, graph.store, tmp_path / "little.npy")
    little = infer(model, graph.store, tmp_path / "little.npy", mem_bytes=mem)
    assert len(much.plan.layers[0].slices) == 1
    assert len(little.plan.layers[0].slices) > 3
    assert (tmp_path / "much.npy").read_bytes() == (tmp_path / "little.npy").read_bytes()


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_the_first_slice_stays_in_memory(graph, tmp_path, monkeypatch, kind):
    """As much as has room, so that only the rest is written and read: the same bytes in the end."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)  # more than rows of so small a graph
    model = make_model(kind, num_hidden=256)
    much = infer(model, graph.store, tmp_path / "much.npy")
    mem = minimum(model, graph.store, tmp_path / "some.npy") + 2_500_000
    some = infer(model, graph.store, tmp_path / "some.npy", mem_bytes=mem)
    assert (tmp_path / "much.npy").read_bytes() == (tmp_path / "some.npy").read_bytes()
    assert some.plan.layers[0].kept
    first, rest = some.plan.layers[0].slices
    assert first.stop >= rest.stop - rest.first
    spilled = 4000 * 4 * (256 + (4 if kind == "gat" else 0)) * (rest.stop - first.stop) // rest.stop
    for moved in ("written_bytes", "read_bytes"):
        first_layers = [r.stages[1] for r in (some, much)]
        assert all(s.name == "layer 1 of 2" for s in first_layers)
        more, less = (getattr(s, moved) for s in first_layers)
        more -= less
        graph_again = 300_000 if moved == "read_bytes" else 0
        assert spilled <= more <= 1.15 * spilled + graph_again  # blocks are not full


def test_wide_columns_and_lonely_nodes(tmp_path):
    """Columns over many blocks, empty ones, the last ones among these."""
    csc = make_csc([5000, 0, 3, 9000, *range(60), 0, 0], 1)
    manifest = write_store(tmp_path / "store", csc, [0], width=4)
    (t,), (relation,) = manifest.types, manifest.relations
    nodes = t.num_nodes
    dst = np.repeat(np.arange(nodes), np.diff(csc.indptr))
    store = open_store(tmp_path / "store")
    degrees = np.concatenate([found.copy() for found, _ in whole_columns(store, relation, t)])
    np.testing.assert_array_equal(degrees, np.diff(csc.indptr))
    torch.manual_seed(0)
    for kind, layer in LAYERS.items():
        model = Layered(layer, 4, 8, 3)
        infer(model, tmp_path / "store", tmp_path / f"{kind}.npy")
        x = np.outer(np.arange(nodes), np.arange(1, 5)).astype(np.float32)
        edges = torch.from_numpy(np.stack([csc.indices.astype(np.int64), dst]))
        close(np.load(tmp_path / f"{kind}.npy"), whole(model, x, edges), 1e-5)


RELATIONS = [("a", "to", "b"), ("b", "by", "a"), ("b", "with", "b"), ("c", "of", "b")]


def whole_batch(graph, node_type):
    """All nodes as the seeds of one batch, with all edges at the first hop."""
    edges = {}
    for relation, (indptr, indices) in graph.relations.items():
        dst = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
        edges[relation] = torch.from_numpy(np.stack([indices.astype(np.int64), dst]))
    return HeteroBatch(
        x={t: torch.from_numpy(graph.x(t)) for t in graph.widths}, y={}, edge_index=edges,
        n_id={t: torch.arange(n) for t, n in graph.num_nodes.items()}, e_id=None,
        input_type=node_type, input_id=torch.arange(graph.num_nodes[node_type]),
        batch_size=graph.num_nodes[node_type],
        num_sampled_nodes={t: [n, 0, 0] for t, n in graph.num_nodes.items()},
        num_sampled_edges={r: [e.size(1), 0] for r, e in edges.items()}, epoch=0, step=0,
    )  # fmt: skip


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", LAYERS)
def test_several_types_equal_the_whole_graph(tmp_path, kind):
    """`c` has no features, and nothing leads to it."""
    rng = np.random.default_rng(5)
    nodes = {"a": 300, "b": 500, "c": 70}
    graph = random_hetero(rng, nodes, RELATIONS, 6, {"a": 7, "b": 3}, "b", long_degree=3000)
    write_hetero_store(tmp_path / "store", graph)
    torch.manual_seed(1)
    widths = {"a": 7, "b": 3, "c": 0}
    model = RelationalModel(LAYERS[kind], widths, list(graph.relations), 48, 4).eval()
    with torch.no_grad():
        expected = model(whole_batch(graph, "b"))
    infer(model, tmp_path / "store", tmp_path / "much.npy")
    close(np.load(tmp_path / "much.npy"), expected, 1e-5)
    mem = minimum(model, tmp_path / "store", tmp_path / "little.npy")
    little = infer(model, tmp_path / "store", tmp_path / "little.npy", mem_bytes=mem)
    assert len(little.plan.layers[0].slices) > 1
    assert (tmp_path / "much.npy").read_bytes() == (tmp_path / "little.npy").read_bytes()


def test_a_split_in_parquet_has_its_ids(graph, tmp_path):
    model = make_model("sage")
    infer(model, graph.store, tmp_path / "y.npy")
    infer(model, graph.store, tmp_path / "test.parquet", split="test")
    infer(model, graph.store, tmp_path / "all.parquet")
    rows, wanted = np.load(tmp_path / "y.npy"), np.load(graph.source / "test_idx.npy")
    for name, ids in (("test", wanted), ("all", np.arange(4000))):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        np.testing.assert_array_equal(table["id"].to_numpy(), ids)
        found = np.stack(table["rows"].to_numpy())
        np.testing.assert_array_equal(found, rows[ids])


def test_an_array_of_the_store(graph, tmp_path):
    folder = tmp_path / "store"
    ingest(PlainSource(graph.source), folder, IngestOptions(block_bytes=16 << 10), QUIET)
    model = make_model("gcn")
    infer(model, folder, tmp_path / "y.npy")
    infer(model, folder, "array:logits")
    verify_store(folder)
    store = open_store(folder)
    (t,) = store.manifest.types
    ids = read_rows(store, t.original_id)
    rows = read_rows(store, t.features["logits"])
    np.testing.assert_array_equal(rows, np.load(tmp_path / "y.npy")[ids])
    with pytest.raises(Refused, match="a name that node does not have yet"):
        infer(model, folder, "array:logits")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "y.npy"]


def test_a_run_goes_on_after_the_last_whole_layer(graph, tmp_path, monkeypatch):
    """The disk fills up after each layer; each run goes on, and gives the same."""
    model, out = make_model("gat", depth=3), tmp_path / "y.npy"
    expected = infer(model, graph.store, tmp_path / "whole.npy")
    real, finished = WorkFolder.finish, []

    def finish(work, record, *rest):
        real(work, record, *rest)
        finished.append(record.name)
        raise OutOfSpace("no room")

    for count in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(WorkFolder, "finish", finish)
            with pytest.raises(OutOfSpace, match="goes on"):
                infer(model, graph.store, out)
        assert len(finished) == count
    assert finished == [f"layer {n} of 3" for n in (1, 2, 3)]
    result = infer(model, graph.store, out)
    assert [s.resumed for s in result.stages] == [False, True, True, True, False]
    assert [s.name for s in result.stages][:4] == [s.name for s in expected.stages][:4]
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["whole.npy", "y.npy"]


def checkpoint(path, model):
    torch.save({"model": Classes(model).state_dict()}, path)
    return path


class Command:
    """`python -m clients.infer` as a fork of this process, which has imported torch."""

    def __init__(self, *words):
        pipes = [os.pipe(), os.pipe()]
        self.pid = os.fork()
        if self.pid == 0:
            for standard, (_, writing) in enumerate(pipes, start=1):
                os.dup2(writing, standard)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
            code = 1
            try:
                code = run_main("clients.infer", *map(str, words))
            finally:
                sys.stdout.flush()
                os._exit(code)
        for _, writing in pipes:
            os.close(writing)
        self.out, self.errors = (os.fdopen(reading) for reading, _ in pipes)

    def ended(self):
        """(exit code, what it wrote to both streams), of a command that writes little."""
        with self.out, self.errors:
            found = self.out.read(), self.errors.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), *found


@pytest.mark.slow
def test_the_command_is_killed_and_goes_on_at_a_daemons_store(graph, tmp_path):
    model = make_model("sage", depth=3)
    saved = checkpoint(tmp_path / "model.pt", model)
    infer(model, graph.store, tmp_path / "whole.npy")
    with daemon(graph.store, "32M", 1) as endpoint:
        killed = Command(endpoint, saved, tmp_path / "y.npy")
        killed.errors.readline()  # a layer is over
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.ended()[0] == -signal.SIGKILL
        code, out, errors = Command(endpoint, saved, tmp_path / "y.npy").ended()
    assert code == 0, errors
    assert "4,000 rows of 5" in out, errors
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert not list(tmp_path.glob(".*"))


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("model", "out", "options", "says"),
    [
        ("sage", "y.txt", {}, "expected FILE.npy, FILE.parquet or array:NAME"),
        ("sage", "y.npy", {"split": "test"}, "give FILE.parquet"),
        ("sage", "y.parquet", {"split": "tset"}, "'tset': expected one of node: train"),
        ("sage", "none/y.npy", {}, "no such folder"),
        ("sage", "y.npy", {"node_type": "paper"}, "'paper', expected one of node"),
        ("sage", "y.npy", {"mem_bytes": 1 << 20}, "expected at least --mem"),
        ("narrow", "y.npy", {}, "takes 23 numbers, expected the store's 24 features"),
        ("other", "y.npy", {}, "found a Linear, expected one of clients.models"),
    ],
)
def test_refusals_are_one_line(graph, tmp_path, model, out, options, says):
    made = {
        "sage": partial(make_model, "sage"),
        "narrow": partial(make_model, "sage", num_in=23),
        "other": partial(torch.nn.Linear, 2, 2),
    }[model]()
    with pytest.raises((Refused, StoreError)) as refused:
        infer(made, graph.store, tmp_path / out, **options)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_overwritten(graph, tmp_path):
    (tmp_path / "y.npy").write_bytes(b"mine")
    with pytest.raises(StoreExists, match="exists already"):
        infer(make_model("sage"), graph.store, tmp_path / "y.npy")
    assert (tmp_path / "y.npy").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", LAYERS)
def test_a_checkpoint_says_which_model_it_is_of(graph, tmp_path, kind):
    model = make_model(kind, depth=3)
    manifest = open_store(graph.store).manifest
    loaded = load_model(checkpoint(tmp_path / "model.pt", model), manifest)
    infer(model, graph.store, tmp_path / "one.npy")
    infer(loaded, graph.store, tmp_path / "two.npy")
    assert digest(tmp_path / "one.npy") == digest(tmp_path / "two.npy")


def test_a_checkpoint_that_does_not_fit_is_refused(graph, tmp_path, capsys):
    manifest = open_store(graph.store).manifest
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "other.pt")
    for name in ("text.pt", "other.pt", "absent.pt"):
        with pytest.raises(Refused, match=r"expected a checkpoint of clients\.train"):
            load_model(tmp_path / name, manifest)
    narrow = checkpoint(tmp_path / "narrow.pt", GraphSage(7, 8, 3))
    code = run_main("clients.infer", *map(str, (graph.store, narrow, tmp_path / "y.npy")))
    out, errors = capsys.readouterr()
    assert (code, out) == (2, "")
    assert errors == (
        "error: model: the first layer takes 7 numbers, expected the store's 24 features x; give "
        "the model of this store\n"
    )
