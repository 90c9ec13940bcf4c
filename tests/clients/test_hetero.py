"""Batches of several types against plain Python, for every plan and budget."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from clients.torch import HeteroBatch, HeteroDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.differences import At, same_hetero_batch  # noqa: E402
from tests.heterostores import HeteroGraph, random_hetero, write_hetero_store  # noqa: E402
from tests.reference import Labor, make_epoch_key, make_key, permute, sample_hetero_batch  # noqa: E402

SEED, BATCH = 3, 8
CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")
EMPLOYS = ("institution", "employs", "author")
WORKS = ("author", "works_at", "institution")
RELATIONS = (CITES, WRITES, WRITTEN, EMPLOYS, WORKS)
MAG = {"author": 90, "institution": 7, "paper": 120}  # MAG240M's types, features of papers alone
OFFSETS = {"author": (0, 30, 90), "institution": (0, 7, 7), "paper": (0, 50, 120)}


@pytest.fixture(scope="module")
def mag(tmp_path_factory) -> tuple[HeteroGraph, Path]:
    """MAG240M's shape, small: columns over several blocks, two partitions."""
    graph = random_hetero(np.random.default_rng(1), MAG, RELATIONS, 12, {"paper": 3}, "paper", 2500)
    store = tmp_path_factory.mktemp("mag") / "store"
    write_hetero_store(store, graph, OFFSETS)
    return graph, store


@pytest.fixture(scope="module", params=["16M", "3M"])
def served(request, mag):
    """A daemon with room for the whole graph, or not."""
    with daemon(mag[1], request.param, 2) as endpoint:
        yield endpoint


def check(graph: HeteroGraph, batch: HeteroBatch, expected: Any, edges: Any = None) -> None:
    """A batch is what the reference gives; `edges`: places in `indices`, by relation."""
    at = At(batch.epoch, batch.step)
    hops = {
        r: (expected.src_local[r], expected.dst_local[r], expected.edges[r])
        for r in graph.relations
    }
    x = {name: graph.x(name) for name in graph.widths}
    same_hetero_batch(at, batch, expected, hops, x, edges)
    assert set(batch.y) == set(graph.labels)
    for name, labels in batch.y.items():
        ids = expected.n_id[name]
        at.same(f"y[{name}]", labels, graph.labels[name][ids], ids)


def check_epoch(
    graph: HeteroGraph, data: HeteroDataset, seed_type: str, fanouts: Any, **options: Any
) -> None:
    """All batches of an epoch."""
    train = graph.train[seed_type]
    data.set_epoch(2)
    batches = list(data)
    assert len(batches) == -(-train.size // BATCH)
    key = make_epoch_key(SEED, 2)
    order = [permute(i, train.size, key) for i in range(train.size)]
    for step, batch in enumerate(batches):
        places = order[step * BATCH : (step + 1) * BATCH]
        assert batch.input_id.tolist() == places
        assert (batch.input_type, batch.batch_size) == (seed_type, len(places))
        expected = sample_hetero_batch(
            graph.first, graph.relations, seed_type, train[places], fanouts, (SEED, 2, step),
            options.get("frontier", "new"), labor=Labor.of(options),
        )  # fmt: skip
        check(graph, batch, expected)


CASES = {
    "the same for all": {"num_neighbors": (4, 3)},
    "by relation": {
        "num_neighbors": dict(
            zip(RELATIONS, ((5, 3, 2), (4, 0, 1), (0, 3, 2), (0, 0, 2), (0, 1, 0)), strict=True)
        )
    },
    "all": {"num_neighbors": dict.fromkeys(RELATIONS, (-1, 2))},
    "layer": {"num_neighbors": (3, 2, 2), "frontier": "layer"},
    "labor": {"num_neighbors": (3, 2, 2), "sampler": "labor", "layer_dependency": True},
}


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_references(mag, served, case, plan):
    graph, _ = mag
    options = CASES[case]
    data = HeteroDataset(
        served, batch_size=BATCH, seed=SEED, plan=plan, input_type="paper", return_e_id=True,
        **options,
    )  # fmt: skip
    fanouts = options["num_neighbors"]
    if not isinstance(fanouts, dict):
        fanouts = dict.fromkeys(RELATIONS, fanouts)
    check_epoch(graph, data, "paper", fanouts, **options)
    data.close()


TYPES = ("a", "b", "c", "d")


@pytest.mark.parametrize("number", range(3))
def test_random_graphs_are_sampled_as_the_reference_does(tmp_path, number):
    """Random types, relations, features and fanouts; both plans, in little memory."""
    rng = np.random.default_rng(number)
    names = TYPES[: rng.integers(1, 5)]
    nodes = {name: int(rng.integers(1, 60)) for name in names}
    pairs = [(a, f"r{i}", b) for i, (a, b) in enumerate(itertools.product(names, names))]
    relations = [pairs[i] for i in rng.permutation(len(pairs))[: rng.integers(1, 7)]]
    widths = {name: int(rng.integers(1, 400)) for name in names if rng.random() < 0.5}
    seed_type = str(rng.choice(names))
    graph = random_hetero(rng, nodes, relations, 9, widths, seed_type, int(rng.integers(0, 3000)))
    write_hetero_store(tmp_path / "store", graph)
    hops = int(rng.integers(1, 4))
    fanouts = {r: [int(k) for k in rng.choice([-1, 0, 1, 2, 5], hops)] for r in relations}
    fanouts[relations[0]] = [3] * hops
    with daemon(tmp_path / "store", "1M", 2) as endpoint:
        for plan in ("minibatch", "hyperbatch"):
            data = HeteroDataset(
                endpoint, "train", fanouts, BATCH, seed=SEED, plan=plan, input_type=seed_type,
                return_e_id=True,
            )  # fmt: skip
            check_epoch(graph, data, seed_type, fanouts)
            data.close()


def test_a_session_that_falls_back_to_single_batches_has_room_for_each(tmp_path):
    """Too little for a cache of rows: after a trial, batches are sampled one by one."""
    rng = np.random.default_rng(7)
    nodes, relations = (
        {"big": 3000, "small": 300},
        [("small", "to", "big"), ("big", "to", "big"), ("big", "of", "small")],
    )
    graph = random_hetero(rng, nodes, relations, 4, {"big": 64, "small": 64}, "big")
    write_hetero_store(tmp_path / "store", graph)
    with daemon(tmp_path / "store", "1536K", 2) as endpoint:
        options = {"input_type": "big", "num_neighbors": (4, 3), "batch_size": BATCH}
        for epoch in range(2):
            data = HeteroDataset(endpoint, plan="hyperbatch", hyperbatch=4, **options)
            data.set_epoch(epoch)
            for batch in data:
                for name, rows in batch.x.items():
                    np.testing.assert_array_equal(rows.numpy(), graph.x(name)[batch.n_id[name]])
            data.close()


def test_macrobatches_are_sampled_within_their_partitions(mag):
    """One partition at a time: a macro-batch's edges are those between its nodes, of all types."""
    graph, store = mag
    fanouts = {CITES: (4, 3), WRITES: (3, 2), WRITTEN: (0, 3), EMPLOYS: (2, 2), WORKS: (1, 0)}
    train = graph.train["paper"]
    deal = make_key(SEED, 0, 1 << 62, 0, 0)
    with daemon(store, "16M", 2) as endpoint:
        data = HeteroDataset(
            endpoint, "train", fanouts, BATCH, seed=SEED, plan="macrobatch", input_type="paper",
            return_e_id=True, macro_partitions=1,
        )  # fmt: skip
        batches = list(data)
        data.close()
    seen: list[int] = []
    for part in (permute(i, 2, deal) for i in range(2)):
        inside = {t: range(*OFFSETS[t][part : part + 2]) for t in MAG}
        kept, places = {}, {}
        for (src, name, dst), (indptr, indices) in graph.relations.items():
            columns = [
                [e for e in range(indptr[v], indptr[v + 1]) if indices[e] in inside[src]]
                for v in range(MAG[dst])
            ]
            places[src, name, dst] = np.array([e for column in columns for e in column], np.int64)
            starts = np.cumsum([0, *map(len, columns)])
            kept[src, name, dst] = (starts, indices[places[src, name, dst]])
        mine = [b for b in batches if train[b.input_id[0]] in inside["paper"]]
        for batch in mine:
            assert all(train[i] in inside["paper"] for i in batch.input_id.tolist())
            expected = sample_hetero_batch(
                graph.first, kept, "paper", train[batch.input_id], fanouts, (SEED, 0, batch.step)
            )
            check(graph, batch, expected, places)
            seen += batch.input_id.tolist()
    assert sorted(seen) == list(range(train.size))


def test_a_batch_moves_as_a_whole(served):
    data = HeteroDataset(served, "train", (2,), BATCH, input_type="paper", return_e_id=True)
    batch = next(iter(data)).to("meta")
    tensors = [*batch.x.values(), *batch.y.values(), *batch.edge_index.values(), batch.input_id]
    tensors += [*batch.n_id.values(), *batch.e_id.values()]
    assert all(t.device.type == "meta" for t in tensors)
    assert sum(batch.num_nodes.values()) == sum(map(sum, batch.num_sampled_nodes.values()))
    data.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "type was not named: expected one of author, institution, paper as input_type"),
        ({"input_type": "venue"}, "seed type 'venue'"),
        ({"input_type": "author"}, "split 'train' is not in the store"),
        ({"num_neighbors": {CITES: (3,)}}, "relation 'author__writes__paper' has fanouts for 0"),
        ({"num_neighbors": {("x", "to", "y"): (3,)}}, "fanouts name relation 'x__to__y'"),
        ({"num_neighbors": (3, 0)}, "fanout 0 at hop 1 of every relation"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(served, options, words):
    given = {"input_type": "paper"} if options else {}
    with pytest.raises(Refused, match=words) as caught:
        len(HeteroDataset(served, **(given | options)))
    assert "\n" not in str(caught.value)


def test_a_dataset_of_one_type_names_the_other(served):
    with pytest.raises(Refused, match=r"5 relations.*HeteroDataset"):
        iter(NeighborDataset(served, input_type="paper"))
