"""Batches that are cut out of a larger one are those that a sampler gives for their seeds alone."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.cut import BatchCutter, cut_batch  # noqa: E402
from clients.torch import Batch, NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.clients.batches import different_fields  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.differences import flat  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.reference import sample_batch  # noqa: E402
from tests.stores import write_store  # noqa: E402

NODES = 400
OPTIONS = {"batch_size": 10_000, "shuffle": False, "frontier": "layer", "seed": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A daemon of a graph with columns of 0 to 30 edges, weights, times and rows of edges."""
    rng = np.random.default_rng(4)
    graph = make_csc(rng.integers(0, 30, NODES), 5)
    path = tmp_path_factory.mktemp("cut") / "store"
    rows = {"kind": np.arange(graph.indices.size * 3, dtype=np.int32).reshape(-1, 3)}
    weights = rng.random(graph.indices.size, np.float32)
    write_store(path, graph, np.arange(NODES), weights=weights, times=graph.times, edge_rows=rows)
    with daemon(path, "64M") as endpoint:
        yield endpoint


def batch_of(endpoint: str, ids, **options) -> Batch:
    """All seeds in one step, in their order: the same keys whichever they are."""
    data = NeighborDataset(endpoint, input_nodes=ids, **(OPTIONS | options))
    (batch,) = data
    data.close()
    return batch


def reference_batch(graph, seeds, fanouts, replace: bool) -> Batch:
    """A batch of the reference sampler as tensors."""
    made = sample_batch(graph.indptr, graph.indices, seeds, fanouts, 7, 1, 2, "layer", replace)
    joined = [flat(part) for part in (made.src_local, made.dst_local, made.edges)]
    n_id = torch.tensor(made.n_id, dtype=torch.int64)
    return Batch(
        x=n_id[:, None] * 0.5, y=n_id % 5, edge_index=torch.tensor(joined[:2], dtype=torch.int64),
        n_id=n_id, e_id=torch.tensor(joined[2], dtype=torch.int64),
        input_id=torch.tensor(seeds, dtype=torch.int64) * 3, batch_size=len(seeds),
        num_sampled_nodes=made.nodes_per_hop, num_sampled_edges=[len(e) for e in made.edges],
        epoch=1, step=2, frontier="layer",
    )  # fmt: skip


@pytest.mark.parametrize("number", range(40))
def test_a_cut_is_what_the_reference_samples_for_its_seeds(number):
    rng = np.random.default_rng(number)
    graph = make_csc(rng.integers(0, 9, rng.integers(1, 60)), number)
    fanouts = rng.choice([-1, 0, 1, 2, 3, 5], rng.integers(1, 5)).tolist()
    seeds = rng.integers(0, graph.num_nodes, rng.integers(1, 30))  # some of them twice
    replace = bool(number % 2)
    cutter = BatchCutter(reference_batch(graph, seeds.tolist(), fanouts, replace))
    for size in (0, 1, seeds.size // 2, seeds.size):
        places = rng.permutation(seeds.size)[:size]
        expected = reference_batch(graph, seeds[places].tolist(), fanouts, replace)
        found = cutter.batch(torch.from_numpy(places))
        assert different_fields(found, expected) == []


@pytest.mark.parametrize(
    "options",
    [
        {"num_neighbors": (4, 3, 2), "return_e_id": True},
        {"num_neighbors": (4, 3, 2), "replace": True, "return_e_id": True},
        {"num_neighbors": (-1, 3), "edge_features": True},
        {"num_neighbors": (5, 5), "weighted": True, "return_e_id": True},
        {"num_neighbors": (5, 5), "sampler": "labor", "return_e_id": True},
        {"num_neighbors": (5, 5), "sampler": "labor", "layer_dependency": True},
    ],
    ids=["plain", "replace", "all", "weighted", "labor", "labor-one-key"],
)
def test_a_cut_is_what_a_daemon_samples_for_its_seeds(served, options):
    rng = np.random.default_rng(8)
    ids = rng.integers(0, NODES, 90)
    cutter = BatchCutter(batch_of(served, ids, **options))
    for places in (np.arange(30), np.arange(60, 90), rng.permutation(90)[:25], np.array([7, 7])):
        expected = batch_of(served, ids[places], **options)
        expected.input_id = torch.from_numpy(places)  # places among all of them
        assert different_fields(cutter.batch(torch.from_numpy(places)), expected) == []


def test_places_lead_to_the_rows_of_a_cut(served):
    batch = batch_of(served, np.arange(50), num_neighbors=(3, 3))
    seeds = torch.tensor([4, 30, 9])
    cut = BatchCutter(batch).structure(seeds)
    whole = cut_batch(batch, seeds)
    assert torch.equal(batch.x[cut.nodes], whole.x)
    assert torch.equal(batch.n_id[cut.nodes], whole.n_id)
    assert torch.equal(whole.n_id[whole.edge_index], batch.n_id[batch.edge_index[:, cut.edges]])


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"frontier": "new"}, "frontier 'new'"),
        ({"input_time": np.arange(20)}, "times of the seeds"),
    ],
)
def test_batches_whose_seeds_depend_on_others_are_refused(served, options, found):
    batch = batch_of(served, np.arange(20), num_neighbors=(3, 3), **options)
    with pytest.raises(Refused, match=f"cutting a batch: found {found}, expected") as caught:
        cut_batch(batch, torch.arange(3))
    assert "\n" not in str(caught.value)
