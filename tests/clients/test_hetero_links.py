"""Seed edges that join two node types, against plain Python, for both plans."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from clients.link import HeteroLinkDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.differences import At, same_hetero_batch  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.reference import (  # noqa: E402
    draw_negatives,
    make_epoch_key,
    permute,
    sample_hetero_batch,
)

SEED, BATCH, EPOCH, FANOUTS = 3, 8, 2, (3, 2)
CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")
NODES = {"author": 90, "paper": 120}
CASES = {
    "pairs": {"negatives": "binary", "amount": 1.5},
    "triplets": {"negatives": "triplet", "amount": 2, "exclude": "self"},
    "edges alone": {"negatives": "none", "exclude": "none"},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A graph and the endpoint that serves it, with a part of its blocks in memory."""
    rng = np.random.default_rng(1)
    graph = random_hetero(rng, NODES, (CITES, WRITES, WRITTEN), 12, {"paper": 3}, "paper", 60_000)
    store = tmp_path_factory.mktemp("links") / "store"
    write_hetero_store(store, graph)
    with daemon(store, "2M", 2) as endpoint:
        yield graph, endpoint


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_references(served, plan, case):
    graph, endpoint = served
    options = {"exclude": "reverse", "amount": 0} | CASES[case]
    data = HeteroLinkDataset(
        endpoint,
        "all",
        FANOUTS,
        BATCH,
        seed=SEED,
        plan=plan,
        relation=WRITES,
        return_e_id=True,
        **options,
    )
    data.set_epoch(EPOCH)
    indptr, indices = graph.relations[WRITES]
    targets = np.repeat(np.arange(NODES["paper"]), np.diff(indptr))
    key = make_epoch_key(SEED, EPOCH)
    for step, batch in zip(range(4), data, strict=False):
        own = [permute(i, indices.size, key) for i in range(step * BATCH, step * BATCH + BATCH)]
        edges = [(int(indices[p]), int(targets[p])) for p in own]
        count = int(BATCH * options["amount"])
        negatives = [
            draw_negatives(SEED, EPOCH, step, step * BATCH, BATCH, count, end, range(NODES[name]))
            for end, name in enumerate(("author", "paper"))
        ]
        sources, ends = [s for s, _ in edges], [t for _, t in edges]
        if options["negatives"] == "binary":
            sources, ends = sources + negatives[0], ends + negatives[1]
        elif options["negatives"] == "triplet":
            ends = ends + negatives[1]
        nodes = [*(("author", s) for s in sources), *(("paper", t) for t in ends)]
        banned = {WRITES: set(edges)} if options["exclude"] != "none" else {}
        if options["exclude"] == "reverse":
            banned[WRITTEN] = {(t, s) for s, t in edges}
        expected = sample_hetero_batch(
            graph.first, graph.relations, "", dict.fromkeys(nodes),
            dict.fromkeys(graph.relations, FANOUTS), (SEED, EPOCH, step), banned=banned,
        )  # fmt: skip
        at = At(EPOCH, step)
        hops = {
            r: (expected.src_local[r], expected.dst_local[r], expected.edges[r])
            for r in graph.relations
        }
        same_hetero_batch(at, batch, expected, hops, {"paper": graph.x("paper")})
        at.same("input_id", batch.input_id, own)
        assert batch.edge_type == WRITES
        authors, papers = batch.n_id["author"], batch.n_id["paper"]
        if options["negatives"] == "triplet":
            assert authors[batch.src_index].tolist() == sources
            assert papers[batch.dst_pos_index].tolist() == ends[:BATCH]
            assert papers[batch.dst_neg_index].T.reshape(-1).tolist() == ends[BATCH:]
        else:
            assert authors[batch.edge_label_index[0]].tolist() == sources
            assert papers[batch.edge_label_index[1]].tolist() == ends
    assert step == 3
    data.close()


def test_the_relation_must_be_named(served):
    with pytest.raises(Refused, match="no relation was named: expected one of paper__"):
        len(HeteroLinkDataset(served[1]))


def test_a_reverse_must_lead_back(served):
    with pytest.raises(Refused, match="expected a relation from 'paper' to 'author'"):
        len(HeteroLinkDataset(served[1], relation=WRITES, reverse=CITES))
