"""Which nodes have edges: rows of others neither take memory nor pass through files."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.errors import CorruptBlock, OutOfSpace  # noqa: E402
from blockstore.store import open_store, read_rows  # noqa: E402
from clients.inference import plan  # noqa: E402
from clients.inference.edges import Nodes, find_connected  # noqa: E402
from clients.models import LAYERS  # noqa: E402
from preprocess.pipeline.work import WorkFolder  # noqa: E402
from tests.clients.inference.test_inference import (  # noqa: E402
    by_target,
    close,
    infer,
    make_model,
    minimum,
    whole,
)
from tests.graphs import make_csc  # noqa: E402
from tests.stores import write_store  # noqa: E402

NODES = 4000


def targets_of(made):
    """(store, targets of its edges, as ids in the store)."""
    store = open_store(made.store)
    rank = np.empty(made.x.shape[0], np.int64)
    (t,) = store.manifest.types
    rank[read_rows(store, t.original_id)] = np.arange(rank.size)
    return store, np.unique(rank[made.edges[1]])


def test_nodes_with_edges_are_found(sparse, lonely):
    key = ("node", "to", "node")
    store, targets = targets_of(lonely)
    connected = find_connected(store)
    assert 0.55 < targets.size / 20_000 < 0.65
    assert np.flatnonzero(connected.receives["node"].among(0, 20_000)).tolist() == targets.tolist()
    assert connected.receives["node"].rows(targets).tolist() == list(range(targets.size))
    assert connected.gives[key] is connected.receives["node"]  # each edge has its reverse
    connected = find_connected(open_store(sparse.store))
    assert connected.gives[key] == connected.receives["node"] == Nodes(NODES)  # all, or nearly


def test_columns_of_many_blocks_are_found_in_the_first(tmp_path):
    degrees = np.array([5000, 0, 0, 3, 9000, *[0] * 20, *range(20), 0, 0])
    write_store(tmp_path / "store", make_csc(degrees.tolist(), 1), [0], width=4)
    found = find_connected(open_store(tmp_path / "store")).receives["node"]
    assert found.num_rows == np.count_nonzero(degrees)
    assert found.among(0, degrees.size).tolist() == (degrees > 0).tolist()


def test_an_edge_without_its_reverse_is_refused():
    some = Nodes.of(np.arange(10) % 2 == 0)
    assert some.rows(np.array([4, 0])).tolist() == [2, 0]
    with pytest.raises(CorruptBlock, match="node 3 has an edge whose reverse is not there"):
        some.rows(np.array([4, 3, 8]))


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("kind", "share"),  # of what sources give, in memory
    [("sage", 0.5), ("gcn", 0.5), ("gat", 0.5), ("gat", 0.75), ("sage", 1.1)]
    + [
        pytest.param(*p, marks=pytest.mark.long)
        for p in (("sage", 0.75), ("gcn", 0.75), ("gcn", 1.1), ("gat", 1.1))
    ],
)
def test_a_layer_reads_little_more_than_rows_and_graph(lonely, tmp_path, monkeypatch, kind, share):
    """At most 1.1 times, by the counter of the system, all that is read for it counted."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model = make_model(kind, num_in=64, num_hidden=64)
    infer(model, lonely.store, tmp_path / "much.npy")
    close(np.load(tmp_path / "much.npy"), whole(model, lonely.x, by_target(lonely.edges)), 1e-5)
    given = 12_000 * 4 * (64 + 4 * (kind == "gat"))
    part = given // 4 if kind == "gat" else 0  # in the minimum
    mem = minimum(model, lonely.store, tmp_path / "y.npy") + int(share * given) - part
    result = infer(model, lonely.store, tmp_path / "y.npy", mem_bytes=mem)
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "much.npy").read_bytes()
    assert (len(result.plan.layers[0].slices) > 1) == (share < 1)
    (relation,) = open_store(lonely.store).manifest.relations
    ends, *layers, _ = result.stages
    ahead = ends.read_bytes
    for stage, num_in, num_out in zip(layers, (64, 64), (64, 5), strict=True):
        ideal = 20_000 * 4 * (num_in + num_out) + relation.num_blocks * (16 << 10)
        tables = 64 << 10  # manifest, checksums, /proc
        assert ahead + stage.read_bytes <= 1.1 * ideal + tables
        ahead = 0


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", LAYERS)
def test_little_memory_gives_the_same_bytes(sparse, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model = make_model(kind, num_hidden=64)
    infer(model, sparse.store, tmp_path / "much.npy")
    close(np.load(tmp_path / "much.npy"), whole(model, sparse.x, by_target(sparse.edges)), 1e-5)
    mem = minimum(model, sparse.store, tmp_path / "little.npy")
    spilled = infer(model, sparse.store, tmp_path / "spilled.npy", mem_bytes=mem)
    # half of what all nodes give has room
    infer(model, sparse.store, tmp_path / "some.npy", mem_bytes=mem + NODES * 4 * 32)
    for name in ("spilled", "some"):
        assert (tmp_path / f"{name}.npy").read_bytes() == (tmp_path / "much.npy").read_bytes()
    assert len(spilled.plan.layers[0].slices) > 1


@pytest.mark.usefixtures("tight")
def test_a_run_that_goes_on_with_other_slices_begins_again(graph, tmp_path, monkeypatch):
    """Of as many slices, but of other columns: rows of layers that are over have their widths."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model, out = make_model("sage", num_hidden=64), tmp_path / "y.npy"
    infer(model, graph.store, tmp_path / "whole.npy")
    mem, real = minimum(model, graph.store, out), WorkFolder.finish
    memories = [mem + NODES * 4 * columns + (90 << 10) for columns in (36, 44)]
    with monkeypatch.context() as patch:

        def finish(work, record, *rest):
            real(work, record, *rest)
            raise OutOfSpace("no room")

        patch.setattr(WorkFolder, "finish", finish)
        with pytest.raises(OutOfSpace, match="goes on"):
            infer(model, graph.store, out, mem_bytes=memories[0])
    result = infer(model, graph.store, out, mem_bytes=memories[1])
    stops = [s.stop for s in result.plan.layers[0].slices]
    assert len(stops) == 2
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
