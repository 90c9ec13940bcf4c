"""Weights and times of edges: with every plan and budget they are those of the source graph."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.link import LinkDataset  # noqa: E402
from clients.mfg import to_minibatch  # noqa: E402
from clients.torch import HeteroDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.graphs import HALOS, OFFSETS, make_csc, spread_csc  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.later import Later  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.stores import write_store  # noqa: E402

Later("torch_geometric")
pyg = Later("clients.pyg")
gnn = Later("torch_geometric.nn")

NODES = OFFSETS[-1]
BOTH = {"edge_weights": True, "edge_times": True}
CITES, WRITES, MAKES = ("p", "cites", "p"), ("a", "writes", "p"), ("p", "made", "a")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Columns from none to several blocks; partitions, hubs and halos."""
    rng = np.random.default_rng(1)
    csc, weights = spread_csc(rng)
    times = rng.integers(-(2**40), 2**40, weights.size)
    store = tmp_path_factory.mktemp("values") / "store"
    write_store(
        store, csc, range(NODES), weights=weights, times=times, offsets=OFFSETS,
        hubs=(17, 33, 200), halos=HALOS,
    )  # fmt: skip
    return SimpleNamespace(csc=csc, weights=weights, times=times, store=store)


@pytest.fixture(scope="module", params=["3M", pytest.param("5M", marks=pytest.mark.long), "64M"])
def served(request, graph):
    """With hardly room for a session, with more, and with room for everything."""
    with daemon(graph.store, request.param, 2) as endpoint:
        yield endpoint


CASES: dict[str, dict[str, Any]] = {
    "new": {"num_neighbors": (4, 3)},
    "layer": {"num_neighbors": (4, 3), "frontier": "layer"},
    "all": {"num_neighbors": (-1, 2)},
    "replace": {"num_neighbors": (5, 4), "replace": True},
    "weighted": {"num_neighbors": (4, 3), "weighted": True},
    "weighted, replace": {"num_neighbors": (4, 3), "weighted": True, "replace": True},
}


def epoch_of(make: Any, endpoint: str, **options: Any) -> list[Any]:
    data = make(endpoint, batch_size=50, seed=3, **options)
    found = list(data)
    data.close()
    return found


def check(graph: Any, batch: Any) -> int:
    """What came with the edges is what the source has of them; returns how many there are."""
    edges = batch.e_id.numpy()
    np.testing.assert_array_equal(batch.edge_weight.numpy(), graph.weights[edges])
    np.testing.assert_array_equal(batch.edge_time.numpy(), graph.times[edges])
    assert (batch.edge_weight.dtype, batch.edge_time.dtype) == (torch.float32, torch.int64)
    np.testing.assert_array_equal(graph.csc.indices[edges], batch.n_id[batch.edge_index[0]])
    return edges.size


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch", "macrobatch"])
@pytest.mark.parametrize("case", CASES)
def test_weights_and_times_are_those_of_the_source(graph, served, plan, case):
    options = {"plan": plan, "return_e_id": True, **BOTH, **CASES[case]}
    assert sum(check(graph, batch) for batch in epoch_of(NeighborDataset, served, **options)) > 1000


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
def test_a_weighted_gcn_gives_what_it_gives_on_the_whole_graph(graph, served, plan):
    """Two layers in float64: of all neighbors the seeds' rows are those of all nodes at once."""
    torch.manual_seed(0)
    layers = [gnn.GCNConv(2, 8, normalize=False), gnn.GCNConv(8, 3, normalize=False)]
    first, second = (layer.double() for layer in layers)
    csc = graph.csc
    x = torch.tensor(np.outer(np.arange(NODES), [1, 2]), dtype=torch.float64) / NODES
    targets = np.repeat(np.arange(NODES), np.diff(csc.indptr))
    edge_index = torch.tensor(np.stack([csc.indices.astype(np.int64), targets]))
    weights = torch.from_numpy(graph.weights).double()
    whole = second(first(x, edge_index, weights).relu(), edge_index, weights)
    asked = {"num_neighbors": (-1, -1), "frontier": "layer", "plan": plan, "edge_weights": True}
    for batch in epoch_of(NeighborDataset, served, **asked):
        last = batch.num_sampled_edges[0]
        edges, own = batch.edge_index[:, last:], batch.edge_weight[last:].double()
        hidden = first(batch.x.double() / NODES, edges, own).relu()
        edges, own = batch.edge_index[:, :last], batch.edge_weight[:last].double()
        found = second(hidden, edges, own)[: batch.batch_size]
        torch.testing.assert_close(
            found, whole[batch.n_id[: batch.batch_size]], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch", "macrobatch"])
def test_one_comes_without_the_other_and_without_ids(served, plan):
    asked = {"plan": plan, "num_neighbors": (4, 3)}
    whole = epoch_of(NeighborDataset, served, **asked, **BOTH)
    for name, other in (("edge_weight", "edge_time"), ("edge_time", "edge_weight")):
        found = epoch_of(NeighborDataset, served, **asked, **{f"{name}s": True})
        for batch, both in zip(found, whole, strict=True):
            assert torch.equal(getattr(batch, name), getattr(both, name))
            assert getattr(batch, other) is None
            assert batch.e_id is None


def test_drawn_with_replacement_edges_of_weight_zero_are_left_out(graph, served):
    options = {"num_neighbors": (9,), "weighted": True, "replace": True, "edge_weights": True}
    positive = np.add.reduceat(
        graph.weights > 0, graph.csc.indptr[:-1].clip(0, graph.weights.size - 1)
    )
    positive[np.diff(graph.csc.indptr) == 0] = 0
    for batch in epoch_of(NeighborDataset, served, **options):
        assert (batch.edge_weight > 0).all()
        counts = torch.bincount(batch.edge_index[1], minlength=batch.batch_size)
        seeds = batch.n_id[: batch.batch_size].numpy()
        assert counts[: seeds.size].tolist() == (9 * (positive[seeds] > 0)).tolist()


def test_seed_edges_leave_theirs_out_and_tcp_brings_the_same(graph):
    edges = np.stack(
        [graph.csc.indices[:40], np.repeat(np.arange(NODES), np.diff(graph.csc.indptr))[:40]]
    )
    options = {"edges": edges, "num_neighbors": (4, 3), "return_e_id": True}
    with remote_daemon(graph.store, "4M") as (local, remote):
        for endpoint in (local, remote):
            assert check(graph, epoch_of(LinkDataset, endpoint, **BOTH, **options)[0])


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Relations with weights and times, with one of them, and with none."""
    rng = np.random.default_rng(2)
    made = random_hetero(rng, {"p": 300, "a": 90}, (CITES, WRITES, MAKES), 12, {"p": 3}, "p", 2500)
    counts = {r: indices.size for r, (_, indices) in made.relations.items()}
    weights = {r: rng.exponential(1.0, counts[r]).astype(np.float32) for r in (CITES, WRITES)}
    times = {CITES: rng.integers(0, 2**50, counts[CITES])}
    offsets = {"p": [0, 100, 180, 300], "a": [0, 30, 60, 90]}
    store = tmp_path_factory.mktemp("several") / "store"
    write_hetero_store(store, made._replace(weights=weights, times=times), offsets)
    with daemon(store, "3M", 2) as endpoint:
        yield SimpleNamespace(weights=weights, times=times, endpoint=endpoint)


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch", "macrobatch"])
def test_each_relation_has_its_own(several, plan):
    options = {"num_neighbors": (5, 3), "input_type": "p", "return_e_id": True, "plan": plan}
    for batch in epoch_of(HeteroDataset, several.endpoint, **options, **BOTH):
        for found, expected in (
            (batch.edge_weight, several.weights), (batch.edge_time, several.times),
        ):  # fmt: skip
            assert set(found) == set(expected)
            for relation, values in found.items():
                edges = batch.e_id[relation].numpy()
                np.testing.assert_array_equal(values.numpy(), expected[relation][edges])


def test_adapters_have_them_under_their_names(graph, several):
    with daemon(graph.store, "64M", 2) as endpoint:
        (batch, *_) = epoch_of(NeighborDataset, endpoint, num_neighbors=(4, 3), **BOTH)
        blocks = to_minibatch(batch).edge_features
        assert [set(layer) for layer in blocks] == [{"weight", "time"}] * 2
        own = {"edge_weights": True, "edge_times": True}
        data = next(iter(pyg.NeighborLoader(endpoint, [4, 3], "train", 50, **own)))
        assert data.edge_weight.shape == data.edge_time.shape == (data.num_edges,)
        data = next(
            iter(pyg.NeighborLoader(endpoint, [4], "train", 50, weight_attr="w", edge_times=True))
        )
        assert data.w.shape == (data.num_edges,)
        assert (data.w > 0).all()
    fanouts = {CITES: (3,), WRITES: (3,), MAKES: (0,)}
    data = next(iter(pyg.NeighborLoader(several.endpoint, fanouts, ("p", "train"), 9, **BOTH)))
    assert data[WRITES].edge_weight.shape == (data[WRITES].edge_index.shape[1],)
    assert "edge_weight" not in data[MAKES]
    data.validate()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "edge_weights",
            "edge_weights: the store has no weights of edges; ingest it with an array",
        ),
        ("edge_times", "edge_times: the store has no times of edges; ingest it with an array"),
    ],
)
def test_a_store_without_them_says_so(tmp_path, option, words):
    write_store(tmp_path / "store", make_csc(np.full(9, 2), 1), range(9))
    with daemon(tmp_path / "store", "16M", 2) as endpoint, pytest.raises(Refused, match=words):
        len(NeighborDataset(endpoint, **{option: True}))
