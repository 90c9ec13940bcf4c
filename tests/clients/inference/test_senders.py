"""What only nodes with edges give takes memory: the same bytes, of less that is read."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.errors import OutOfSpace  # noqa: E402
from blockstore.store import open_store  # noqa: E402
from clients.inference import plan  # noqa: E402
from clients.inference.senders import find_senders  # noqa: E402
from clients.models import LAYERS, RelationalModel  # noqa: E402
from preprocess.pipeline.work import WorkFolder  # noqa: E402
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
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402

NODES = 4000


def test_places_are_those_of_nodes_with_edges(sparse, graph):
    store = open_store(sparse.store)
    (t,), (relation,) = store.manifest.types, store.manifest.relations
    places = find_senders(store, relation, t, QUIET)
    indptr_free = [e for _, e in edges_of(store, relation)]
    senders = np.unique(np.concatenate(indptr_free))
    assert 0.35 * NODES < senders.size < 0.45 * NODES
    assert np.flatnonzero(np.diff(places)).tolist() == senders.tolist()
    assert places[senders].tolist() == list(range(senders.size))
    store = open_store(graph.store)  # where nearly all have edges: it is not read to its end
    assert find_senders(store, store.manifest.relations[0], store.manifest.types[0], QUIET) is None


def edges_of(store, relation):
    from clients.inference.rows import whole_columns

    for degrees, ids in whole_columns(store, relation, 0, NODES):
        yield degrees.copy(), ids.copy()


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", LAYERS)
def test_little_memory_gives_the_same_bytes(sparse, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model = make_model(kind, num_hidden=64)
    much = infer(model, sparse.store, tmp_path / "much.npy")
    close(np.load(tmp_path / "much.npy"), whole(model, sparse.x, by_target(sparse.edges)), 1e-5)
    mem = least(model, sparse.store, tmp_path / "little.npy")
    spilled = infer(model, sparse.store, tmp_path / "spilled.npy", mem_bytes=mem)
    # half of what all nodes give has room
    some = infer(model, sparse.store, tmp_path / "some.npy", mem_bytes=mem + NODES * 4 * 32)
    for name in ("spilled", "some"):
        assert (tmp_path / f"{name}.npy").read_bytes() == (tmp_path / "much.npy").read_bytes()
    found = [s.name for s in some.stages]
    if kind != "sage":  # a target gets its part from what it gives as a source
        assert found[0] == "layer 1 of 2"
        return
    assert found[0] == "sources with edges"
    assert some.plan.layers[0].resident
    assert len(spilled.plan.layers[0].slices) > 1
    first = next(s for s in some.stages if s.name == "layer 1 of 2")
    assert abs(first.read_bytes - much.stages[0].read_bytes) < 64 << 10
    assert find_senders_read(some) < first.read_bytes / 4


def find_senders_read(result):
    return next(s.read_bytes for s in result.stages if s.name == "sources with edges")


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("kind", LAYERS)
def test_relations_have_senders_of_their_own(tmp_path, kind):
    rng = np.random.default_rng(5)
    nodes = {"a": 300, "b": 3000, "c": 2000}  # 4 edges a node on average: many b give nothing to a
    graph = random_hetero(rng, nodes, RELATIONS, 3, {"a": 7, "b": 3}, "b")
    write_hetero_store(tmp_path / "store", graph)
    torch.manual_seed(1)
    widths = {"a": 7, "b": 3, "c": 0}
    model = RelationalModel(LAYERS[kind], widths, list(graph.relations), 48, 4).eval()
    with torch.no_grad():
        expected = model(whole_batch(graph, "b"))
    infer(model, tmp_path / "store", tmp_path / "much.npy")
    close(np.load(tmp_path / "much.npy"), expected, 1e-5)
    mem = least(model, tmp_path / "store", tmp_path / "little.npy")
    little = infer(model, tmp_path / "store", tmp_path / "little.npy", mem_bytes=mem)
    assert little.stages[0].name == "sources with edges"
    assert (tmp_path / "much.npy").read_bytes() == (tmp_path / "little.npy").read_bytes()


@pytest.mark.usefixtures("tight")
def test_a_run_that_goes_on_with_other_slices_begins_again(graph, tmp_path, monkeypatch):
    """Of as many slices, but of other columns: rows of layers that are over have their widths."""
    monkeypatch.setattr(plan, "BUFFER_BYTES", 4 << 10)
    model, out = make_model("sage", num_hidden=64), tmp_path / "y.npy"
    infer(model, graph.store, tmp_path / "whole.npy")
    mem, real = least(model, graph.store, out), WorkFolder.finish
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
