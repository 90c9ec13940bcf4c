"""Batches of edges up to a time, end to end against plain Python, for both plans."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.link import LinkDataset
from clients.torch import NeighborDataset
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Temporal
from loaderd.sessions.resolve import resolve
from tests.daemons import daemon
from tests.differences import At, same_batch
from tests.graphs import Csc, make_csc
from tests.reference import (
    draw_negatives,
    make_epoch_key,
    permute,
    sample_trees,
    tree_number,
)
from tests.stores import write_store

SEED, BATCH, EPOCH, FANOUTS = 3, 7, 2, (4, 3)
TIGHT = "2M"  # a tenth of the graph's blocks in memory


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> tuple[Csc, np.ndarray, Path]:
    """Columns from none to several blocks of 4 KiB, times with many equal ones, and their store."""
    rng = np.random.default_rng(1)
    degrees = rng.integers(0, 20, 6000)
    degrees[[5, 17]] = (9000, 600)
    graph = make_csc(degrees, 2)
    times = rng.integers(-5, 60, graph.indices.size) << 40
    store = tmp_path_factory.mktemp("temporal") / "store"
    weights = np.ones(graph.indices.size, np.float32)  # they lie before the times
    write_store(store, graph, range(40), weights=weights, times=times)
    return graph, times, store


@pytest.fixture(scope="module")
def endpoint(graph):
    """Of a daemon."""
    with daemon(graph[2], TIGHT, 2) as found:
        yield found


@pytest.fixture(params=["minibatch", "hyperbatch"])
def served(request, endpoint):
    """An endpoint, and the plan to ask for."""
    return endpoint, request.param


@pytest.mark.parametrize(
    ("served", "strategy", "strict", "frontier"),
    [  # each value beside each other one
        pytest.param(
            plan, strategy, strict, frontier,
            marks=() if (i + j + k) % 2 == m else pytest.mark.long,
        )
        for i, strict in enumerate((False, True))
        for j, strategy in enumerate(("uniform", "last"))
        for k, frontier in enumerate(("new", "layer"))
        for m, plan in enumerate(("minibatch", "hyperbatch"))
    ],
    indirect=["served"],
)  # fmt: skip
def test_nodes_see_what_was_before_them(graph, served, strategy, strict, frontier):
    csc, times, _ = graph
    endpoint, plan = served
    rng = np.random.default_rng(4)
    nodes = rng.integers(0, 6000, 30)
    nodes[:4] = (5, 5, 17, 5)
    seed_times = rng.choice(times, 30)
    data = NeighborDataset(
        endpoint, num_neighbors=FANOUTS, batch_size=BATCH, seed=SEED, plan=plan, input_nodes=nodes,
        input_time=seed_times, temporal_strategy=strategy, strict=strict, frontier=frontier,
        return_e_id=True,
    )  # fmt: skip
    data.set_epoch(EPOCH)
    key = make_epoch_key(SEED, EPOCH)
    for step, batch in enumerate(data):
        own = range(step * BATCH, min(30, step * BATCH + BATCH))
        places = [permute(i, 30, key) for i in own]
        limits = [int(seed_times[p]) - strict for p in places]
        expected = sample_trees(
            csc.indptr, csc.indices, times, nodes[places].tolist(), limits,
            [tree_number(i) for i in own], FANOUTS, SEED, EPOCH, step, strategy == "last", frontier,
        )  # fmt: skip
        at = At(EPOCH, step)
        same_batch(at, batch, expected)
        at.same("input_id", batch.input_id, places)
        at.same("batch", batch.batch, expected.trees, expected.n_id)
        at.same("seed_time", batch.seed_time, seed_times[places], nodes[places])
    assert step == 4
    data.close()


CASES = {
    "own times": {"negatives": "binary", "amount": 0.5},
    "own times, last": {"negatives": "none", "temporal_strategy": "last"},
    "triplets": {"listed": 20, "negatives": "triplet", "amount": 2},
    "a list": {"listed": 20, "negatives": "binary", "amount": 1, "strict": True},
}


@pytest.mark.parametrize(
    ("served", "case"),
    [
        pytest.param(plan, case, marks=() if i % 2 == j else pytest.mark.long)
        for i, case in enumerate(CASES)
        for j, plan in enumerate(("minibatch", "hyperbatch"))
    ],
    indirect=["served"],
)
def test_edges_see_what_was_before_them(graph, served, case):
    csc, times, _ = graph
    endpoint, plan = served
    options = {"amount": 0, "temporal_strategy": "uniform"} | CASES[case]
    listed = options.pop("listed", 0)
    num = csc.indices.size
    chosen = np.random.default_rng(9).integers(0, num, listed) if listed else np.arange(num)
    targets = np.repeat(np.arange(6000), np.diff(csc.indptr))[chosen]
    sources = csc.indices[chosen].astype(np.int64)
    asked = torch.from_numpy(np.stack([sources, targets])) if listed else "all"
    data = LinkDataset(
        endpoint, asked, FANOUTS, BATCH, seed=SEED, plan=plan, return_e_id=True,
        edge_label_time=times[chosen] if listed else "own", **options,
    )  # fmt: skip
    data.set_epoch(EPOCH)
    key = make_epoch_key(SEED, EPOCH)
    strict = options.get("strict", not listed)
    for step, batch in zip(range(3), data, strict=False):
        own = range(step * BATCH, min(chosen.size, step * BATCH + BATCH))
        places = [permute(i, chosen.size, key) for i in own]
        count = math.ceil(len(own) * options["amount"])
        negatives = [
            draw_negatives(SEED, EPOCH, step, own.start, len(own), count, end, range(6000))
            for end in (0, 1)
        ]
        columns = {0: sources[places].tolist(), 2: targets[places].tolist()}
        if options["negatives"] != "none":
            columns[3] = negatives[1]
        if options["negatives"] == "binary":
            columns[1] = negatives[0]
        ends = [(end, j, node) for end in sorted(columns) for j, node in enumerate(columns[end])]
        edge_of = [j % len(own) for _, j, _ in ends]
        own_times = times[chosen][places]
        expected = sample_trees(
            csc.indptr, csc.indices, times, [node for _, _, node in ends],
            [int(own_times[e]) - strict for e in edge_of],
            [tree_number(own[j % len(own)], end, j // len(own)) for end, j, _ in ends],
            FANOUTS, SEED, EPOCH, step, options["temporal_strategy"] == "last",
        )  # fmt: skip
        at = At(EPOCH, step)
        same_batch(at, batch, expected)
        at.same("input_id", batch.input_id, places)
        at.same("batch", batch.batch, [edge_of[tree] for tree in expected.trees], expected.n_id)
        at.same("seed_time", batch.seed_time, own_times)
        if options["negatives"] == "triplet":
            assert batch.dst_neg_index.T.reshape(-1).tolist() == list(
                range(2 * len(own), len(ends))
            )
        else:
            half = len(ends) // 2
            assert batch.edge_label_index.reshape(-1).tolist() == list(range(len(ends)))
            assert batch.edge_label_time.tolist() == own_times[edge_of[:half]].tolist()
    data.close()


def test_times_of_a_split_follow_its_order(graph, served):
    endpoint, plan = served
    times = np.arange(40) << 40
    data = NeighborDataset(
        endpoint, num_neighbors=(2,), batch_size=16, plan=plan, input_time=times, shuffle=False
    )
    assert torch.cat([batch.seed_time for batch in data]).tolist() == times.tolist()
    assert "+times:" in data.attached().resolved.seeds
    data.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda e: NeighborDataset(e, input_time=[1, 2]), "times: 2 for 40 seeds"),
        (lambda e: NeighborDataset(e, input_time=range(40), replace=True), "neither replace"),
        (lambda e: NeighborDataset(e, num_neighbors=(-1,), input_time=range(40)), "fanout -1"),
        (
            lambda e: NeighborDataset(e, input_time=range(40), temporal_strategy="first"),
            "temporal.strategy is 'first', expected uniform or last",
        ),
        (
            lambda e: NeighborDataset(e, input_time=range(40), plan="macrobatch"),
            "does not sample by time",
        ),
        (
            lambda e: LinkDataset(e, edge_label_time="own", exclude="self"),
            "which excludes by time",
        ),
        (lambda e: LinkDataset(e, [[1], [2]], edge_label_time="own"), "expected all edges"),
        (lambda e: NeighborDataset(e, input_time=[0.5]), "expected integers"),
        (lambda e: NeighborDataset(e, input_time=[-(2**63)]), "expected later ones"),
    ],
)
def test_what_makes_no_sense_is_refused(served, make, words):
    with pytest.raises(Refused, match=words):
        len(make(served[0]))


def test_times_must_be_there(graph, tmp_path):
    manifest = write_store(tmp_path / "store", graph[0], range(40))
    request = Attach(token=0, request=0, num_neighbors=(2,), temporal=Temporal())
    with pytest.raises(Refused, match="'node__to__node' has no times; ingest it with an array"):
        resolve(manifest, request, "split:train", 40)
