"""Rows of sampled edges: those of the ids that the same batch has, for every plan and budget."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.link import HeteroLinkDataset, LinkDataset  # noqa: E402
from clients.torch import HeteroDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.later import Later  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.stores import write_store  # noqa: E402

Later("torch_geometric")
pyg = Later("clients.pyg")

NODES, TRAIN, TIGHT = 3000, 60, "6M"  # a third of what is served in memory
CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")
TYPES = {"author": 90, "paper": 120}


def rows_of_edges(num: int, width: int) -> np.ndarray:
    """Rows that no two edges share."""
    return (np.arange(num)[:, None] * 4 + np.arange(width)).astype(np.float32)


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> tuple[dict[str, np.ndarray], Path, int]:
    """Columns from none to several blocks, with weights, times and two arrays of the edges."""
    rng = np.random.default_rng(1)
    degrees = rng.integers(0, 20, NODES)
    degrees[[5, 17]] = (9000, 700)
    csc = make_csc(degrees, 2)
    num = csc.indices.size
    arrays = {"feat": rows_of_edges(num, 100), "type": rng.integers(0, 9, num)}
    weights = rng.exponential(1.0, num).astype(np.float32)
    times = rng.integers(0, 40, num)
    store = tmp_path_factory.mktemp("edges") / "store"
    write_store(store, csc, range(TRAIN), weights=weights, times=times, edge_rows=arrays)
    return arrays, store, weights, times


@pytest.fixture(scope="module")
def served(graph):
    """Endpoints with room for everything, with less, with little, and that one over tcp."""
    small = remote_daemon(graph[1], TIGHT, "--remote-credit", "64K")
    middle = daemon(graph[1], "20M", 2)
    with remote_daemon(graph[1], "64M") as (roomy, _), middle as middling, small as (tight, remote):
        yield SimpleNamespace(roomy=roomy, middling=middling, tight=tight, remote=remote)


WAYS = [
    ("roomy", "minibatch"), ("tight", "minibatch"), ("tight", "hyperbatch"), ("remote", "auto"),
    ("roomy", "hyperbatch"), ("middling", "hyperbatch"),
]  # fmt: skip
CASES = {
    "new": {"num_neighbors": (4, 3)},
    "layer": {"num_neighbors": (4, 3), "frontier": "layer"},
    "all": {"num_neighbors": (-1, 2)},
    "replace": {"num_neighbors": (5, 4), "replace": True},
    "weighted": {"num_neighbors": (4, 3), "weighted": True},
    "uniform in time": {"num_neighbors": (4, 3), "input_time": np.arange(TRAIN)},
    "last": {"num_neighbors": (4, 3), "input_time": np.arange(TRAIN), "temporal_strategy": "last"},
}


def batches_of(make, endpoint: str, plan: str, maximum: int | None = None, **options) -> list:
    """An epoch, or the first batches of one."""
    data = make(endpoint, batch_size=20, plan=plan, seed=3, **options)
    found = list(islice(data, maximum))
    data.close()
    return found


def check(batch, plain, arrays) -> None:
    """A batch of one type is the plain one, with rows of its edges."""
    for name in ("n_id", "edge_index", "input_id", "x"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert batch.e_id is None
    assert set(batch.edge_features) == set(arrays)
    for name, values in arrays.items():
        found = batch.edge_features[name].numpy()
        np.testing.assert_array_equal(found, values[plain.e_id])
        assert found.dtype == values.dtype


@pytest.mark.parametrize("case", CASES)
def test_edges_bring_their_rows(graph, served, case):
    arrays, options = graph[0], CASES[case]
    expected = batches_of(NeighborDataset, served.roomy, "auto", return_e_id=True, **options)
    for endpoint, plan in WAYS:
        found = batches_of(
            NeighborDataset, getattr(served, endpoint), plan, edge_features=True, **options
        )
        for batch, plain in zip(found, expected, strict=True):
            check(batch, plain, arrays)


def test_hyperbatches_bring_rows_of_edges_together(served):
    """With the cache, as they do rows of nodes: each edge that is wanted is counted once."""
    before = ask_status(parse_either(served.middling)).counters
    data = NeighborDataset(
        served.middling, batch_size=20, plan="hyperbatch", num_neighbors=(9, 9), edge_features=True
    )
    wanted = sum(batch.edge_index.shape[1] + batch.num_nodes for batch in data)
    assert data.attached().plan == "hyperbatch"
    after = ask_status(parse_either(served.middling)).counters
    data.close()
    assert after["hyper_rows_wanted"] - before.get("hyper_rows_wanted", 0) == wanted


def test_ids_weights_and_times_come_beside_them(graph, served):
    arrays, options = graph[0], {"num_neighbors": (4, 3), "return_e_id": True}
    more = {"edge_features": True, "edge_weights": True, "edge_times": True}
    expected = batches_of(NeighborDataset, served.roomy, "auto", **options)
    for endpoint, plan in WAYS:
        found = batches_of(NeighborDataset, getattr(served, endpoint), plan, **options, **more)
        for batch, plain in zip(found, expected, strict=True):
            assert torch.equal(batch.e_id, plain.e_id)
            assert batch.edge_weight.tolist() == graph[2][plain.e_id].tolist()
            assert batch.edge_time.tolist() == graph[3][plain.e_id].tolist()
            check(replace(batch, e_id=None), plain, arrays)


def test_rows_of_edges_come_in_several_groups(graph):
    options = {"num_neighbors": (6, 4), "window": 1}
    with remote_daemon(graph[1], "1664K") as (local, remote):
        expected = batches_of(NeighborDataset, local, "minibatch", return_e_id=True, **options)
        for endpoint in (local, remote):
            before = ask_status(parse_either(local)).counters
            found = batches_of(
                NeighborDataset, endpoint, "minibatch", edge_features=True, **options
            )
            after = ask_status(parse_either(local)).counters
            assert after["groups"] - before["groups"] > after["batches"] - before["batches"]
            for batch, plain in zip(found, expected, strict=True):
                check(batch, plain, graph[0])


def test_seed_edges_leave_their_rows_out(graph, served):
    options = {"edges": np.arange(80).reshape(2, 40), "num_neighbors": (4, 3)}
    expected = batches_of(LinkDataset, served.roomy, "auto", return_e_id=True, **options)
    for endpoint, plan in WAYS:
        found = batches_of(
            LinkDataset, getattr(served, endpoint), plan, edge_features=True, **options
        )
        for batch, plain in zip(found, expected, strict=True):
            check(batch, plain, graph[0])


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Several types; edges of one relation have two arrays, of one a wide one, of one none."""
    rng = np.random.default_rng(2)
    relations = (CITES, WRITES, WRITTEN)
    made = random_hetero(rng, TYPES, relations, 12, {"paper": 3}, "paper", 2500)
    counts = {r: edges.size for r, (_, edges) in made.relations.items()}
    rows = {
        CITES: {"feat": rows_of_edges(counts[CITES], 2), "age": np.arange(counts[CITES])},
        WRITTEN: {"feat": rows_of_edges(counts[WRITTEN], 300)},
    }
    store = tmp_path_factory.mktemp("several") / "store"
    write_hetero_store(store, made._replace(edge_rows=rows))
    with remote_daemon(store, "2M") as (local, remote):
        yield SimpleNamespace(rows=rows, local=local, remote=remote)


@pytest.mark.parametrize("links", [False, True])
def test_each_relation_has_its_own(several, links):
    fanouts = {CITES: (5, 3), WRITES: (4, 2), WRITTEN: (0, 3)}
    options = {"num_neighbors": fanouts, "input_type": "paper"}
    make = HeteroDataset
    if links:
        options = {"num_neighbors": fanouts, "edges": "all", "relation": WRITES}
        make = HeteroLinkDataset
    expected = batches_of(make, several.local, "auto", 3, return_e_id=True, **options)
    for endpoint, plan in (("local", "minibatch"), ("local", "hyperbatch"), ("remote", "auto")):
        found = batches_of(make, getattr(several, endpoint), plan, 3, edge_features=True, **options)
        for batch, plain in zip(found, expected, strict=True):
            assert {r: set(own) for r, own in batch.edge_features.items()} == {
                r: set(own) for r, own in several.rows.items()
            }
            for r, own in several.rows.items():
                assert torch.equal(batch.edge_index[r], plain.edge_index[r])
                for name, values in own.items():
                    wanted = values[plain.e_id[r]]
                    np.testing.assert_array_equal(batch.edge_features[r][name].numpy(), wanted)
            assert torch.equal(batch.x["paper"], plain.x["paper"])


def test_pyg_finds_them_under_its_names(served, several):
    data = next(iter(pyg.NeighborLoader(served.roomy, [3], "train", 8, edge_features=True)))
    assert data.edge_feat.shape == (data.num_edges, 100)
    assert data.edge_type.shape == (data.num_edges,)
    hetero = {"num_neighbors": [3, 2], "batch_size": 8, "edge_features": True}
    for loader in (
        pyg.NeighborLoader(several.local, input_nodes=("paper", "train"), **hetero),
        pyg.LinkNeighborLoader(several.local, edge_label_index=(CITES, None), **hetero),
    ):
        data = next(iter(loader))
        assert data[WRITTEN].edge_attr.shape == (data[WRITTEN].edge_index.shape[1], 300)
        assert "edge_attr" not in data[WRITES]
        data.validate()


def test_a_store_without_them_says_so(tmp_path):
    write_store(tmp_path / "store", make_csc(np.full(9, 2), 1), range(9))
    with (
        remote_daemon(tmp_path / "store", "16M") as (local, _),
        pytest.raises(Refused, match="the store has no arrays of edges; ingest"),
    ):
        len(NeighborDataset(local, edge_features=True))
