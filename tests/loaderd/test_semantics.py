"""What a hop expands and how it draws, end to end against plain Python, for both plans."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from clients.torch import NeighborDataset
from loaderd.api.errors import Refused
from tests.daemons import daemon
from tests.differences import At, same_batch
from tests.graphs import Csc, make_csc
from tests.reference import Labor, SampledBatch, make_epoch_key, permute, sample_batch
from tests.stores import write_store

SEED, BATCH, TRAIN = 3, 8, 40
BUDGETS = {"minibatch": "16M", "hyperbatch": "16M", "auto": "2M"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> tuple[Csc, np.ndarray, Path]:
    """Columns from none to several blocks of 4 KiB, weights with zeros, and their store."""
    rng = np.random.default_rng(1)
    degrees = rng.integers(0, 30, 400)
    degrees[[5, 17, 200]] = (3000, 1500, 900)
    graph = make_csc(degrees, 2)
    weights = rng.exponential(1.0, graph.indices.size).astype(np.float32)
    weights[rng.random(weights.size) < 0.2] = 0
    weights[graph.indptr[9] : graph.indptr[10]] = 0
    store = tmp_path_factory.mktemp("semantics") / "store"
    write_store(store, graph, range(TRAIN), weights=weights)
    return graph, weights, store


@pytest.fixture(scope="module", params=BUDGETS)
def served(request, graph):
    """An endpoint, and the plan to ask for."""
    with daemon(graph[2], BUDGETS[request.param], 2) as endpoint:
        yield endpoint, request.param


CASES = {
    "new": {"num_neighbors": (4, 3, 2)},
    "layer": {"num_neighbors": (4, 3, 2), "frontier": "layer"},
    "all": {"num_neighbors": (-1, 2)},
    "all, layer": {"num_neighbors": (3, -1), "frontier": "layer"},
    "replace": {"num_neighbors": (5, 4), "replace": True},
    "replace, layer": {"num_neighbors": (5, 4), "replace": True, "frontier": "layer"},
    "weighted": {"num_neighbors": (4, 3, 2), "weighted": True},
    "weighted, layer": {"num_neighbors": (7, 70), "weighted": True, "frontier": "layer"},
    "weighted, all": {"num_neighbors": (3, -1), "weighted": True},
    "five hops": {"num_neighbors": (2, 2, 2, 1, 1)},
    "labor": {"num_neighbors": (4, 3, 2), "sampler": "labor"},
    "labor, layer": {"num_neighbors": (7, 70), "sampler": "labor", "frontier": "layer"},
    "labor, all": {"num_neighbors": (3, -1, 4), "sampler": "labor"},
    "labor, one key of all hops": {
        "num_neighbors": (4, 4, 4),
        "sampler": "labor",
        "layer_dependency": True,
    },
    "labor, one key of two steps": {
        "num_neighbors": (4, 3),
        "sampler": "labor",
        "batch_dependency": 2,
    },
    "wider than the graph": {"num_neighbors": (10, 200)},
    "wider than the graph, layer": {"num_neighbors": (20, 70, 70), "frontier": "layer"},
}


@pytest.fixture(scope="module")
def references(graph):
    """The batches of a case, made once for all plans."""
    csc, weights, _ = graph
    key = make_epoch_key(SEED, 2)
    order = [permute(i, TRAIN, key) for i in range(TRAIN)]

    @cache
    def found(case: str) -> list[SampledBatch]:
        options = CASES[case]
        return [
            sample_batch(
                csc.indptr, csc.indices, order[step * BATCH : (step + 1) * BATCH],
                options["num_neighbors"], SEED, 2, step, options.get("frontier", "new"),
                options.get("replace", False), weights if options.get("weighted") else None,
                labor=Labor.of(options),
            )
            for step in range(TRAIN // BATCH)
        ]  # fmt: skip

    return found


@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_references(served, references, case):
    endpoint, plan = served
    options = CASES[case]
    data = NeighborDataset(
        endpoint, batch_size=BATCH, seed=SEED, plan=plan, return_e_id=True, **options
    )
    data.set_epoch(2)
    batches = list(data)
    data.close()
    assert len(batches) == TRAIN // BATCH
    for step, (batch, expected) in enumerate(zip(batches, references(case), strict=True)):
        same_batch(At(2, step), batch, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frontier": "all"}, "frontier 'all': expected new or layer"),
        ({"replace": True, "num_neighbors": (-1,)}, "fanout -1"),
        ({"sampler": "labor", "replace": True}, "found replace=True, .* leave it out"),
        ({"sampler": "labor", "weighted": True}, "found weighted=True, .* leave it out"),
        (
            {"sampler": "labor", "input_nodes": [1], "input_time": [1]},
            "found times of the seeds, .* leave it out",
        ),
        ({"sampler": "labor", "batch_dependency": 0}, "batch_dependency is 0, expected 1"),
        ({"sampler": "labour"}, "sampler 'labour': expected 'neighbor' or 'labor'"),
        ({"layer_dependency": True}, "layer_dependency: found sampler 'neighbor'"),
    ],
)
def test_what_makes_no_sense_is_refused(served, options, words):
    with pytest.raises(Refused, match=words):
        len(NeighborDataset(served[0], **options))


def test_weights_must_be_there(graph, tmp_path):
    write_store(tmp_path / "store", graph[0], range(TRAIN))
    with daemon(tmp_path / "store", "16M", 1) as endpoint, pytest.raises(Refused, match="weights"):
        len(NeighborDataset(endpoint, weighted=True))


def test_a_group_of_roots_is_a_cut_of_its_batch_where_hops_expand_layers(graph):
    """Micrographs: what some roots find alone, keyed alike, is what they find in the batch."""
    csc = graph[0]
    seeds, fanouts = [5, 30, 31, 80, 81, 82], (3, 3, 3)

    def edges(roots: list[int], frontier: str) -> list[set[tuple[int, int]]]:
        found = sample_batch(csc.indptr, csc.indices, roots, fanouts, SEED, 0, 0, frontier)
        return [
            {(found.n_id[target], edge) for target, edge in zip(dst, ids, strict=True)}
            for dst, ids in zip(found.dst_local, found.edges, strict=True)
        ]

    cuts = {}
    for frontier in ("new", "layer"):
        whole = edges(seeds, frontier)
        parts = [edges(seeds[:3], frontier), edges(seeds[3:], frontier)]
        cuts[frontier] = all(
            whole[hop] == parts[0][hop] | parts[1][hop] for hop in range(len(fanouts))
        )
    assert cuts == {"new": False, "layer": True}
