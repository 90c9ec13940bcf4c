"""Batches of seed edges, end to end against plain Python, for both plans."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clients.link import LinkDataset
from loaderd.api.errors import Refused
from tests.daemons import daemon
from tests.differences import At, same_batch
from tests.graphs import Csc, make_csc
from tests.reference import Labor, make_epoch_key, permute, sample_link_batch
from tests.stores import write_store

SEED, BATCH, EPOCH = 3, 9, 2
TIGHT = "2M"  # an eighth of the graph's blocks in memory
SERVED = [("minibatch", "32M"), ("minibatch", TIGHT), ("hyperbatch", TIGHT)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> tuple[Csc, Path]:
    """Columns from none to many blocks of 4 KiB, and their store of a megabyte."""
    rng = np.random.default_rng(1)
    degrees = rng.integers(0, 24, 6000)
    degrees[[5, 17, 3000]] = (30_000, 25_000, 1500)
    degrees[7:12] = 0
    graph = make_csc(degrees, 2)
    store = tmp_path_factory.mktemp("links") / "store"
    write_store(store, graph, range(4))
    return graph, store


@pytest.fixture(scope="module")
def endpoints(graph):
    """By budget."""
    with daemon(graph[1], "32M", 2) as roomy, daemon(graph[1], TIGHT, 2) as tight:
        yield {"32M": roomy, TIGHT: tight}


@pytest.fixture(params=SERVED, ids=lambda p: f"{p[0]}-{p[1]}")
def served(request, endpoints):
    """An endpoint, and the plan to ask for."""
    plan, mem = request.param
    return endpoints[mem], plan


@pytest.fixture(scope="module")
def every_edge(graph) -> list[tuple[int, int]]:
    """Of the graph, as `all_edges`."""
    return all_edges(graph[0])


def all_edges(graph: Csc) -> list[tuple[int, int]]:
    """(source, target) in the order of the columns."""
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return list(zip(graph.indices.tolist(), targets.tolist(), strict=True))


CASES = {
    "all edges": {"exclude": "none"},
    "all, reverse": {},
    "no negatives": {"negatives": "none", "exclude": "self"},
    "a list": {"listed": 40, "amount": 0.4},
    "a list, triplets": {"listed": 31, "negatives": "triplet", "amount": 3},
    "triplets, layers": {"listed": 31, "negatives": "triplet", "frontier": "layer"},
    "three hops": {"listed": 25, "num_neighbors": (12, 2, 1), "amount": 2},
    "replace": {"listed": 25, "replace": True, "shuffle": False},
    "two ranks": {"listed": 50, "world_size": 2, "rank": 1},
    "labor, two ranks": {
        "listed": 50,
        "world_size": 2,
        "rank": 1,
        "sampler": "labor",
        "batch_dependency": 2,
    },
}


# with little memory each case with one plan, and how many hops and draws there are with both
TIGHT_CASES = {
    "minibatch": ("all edges", "a list", "three hops", "two ranks"),
    "hyperbatch": CASES.keys() - {"a list", "two ranks", "no negatives"},
}


@pytest.mark.parametrize(
    ("served", "case"),
    [
        pytest.param(
            (plan, mem), case, id=f"{plan}-{mem}-{case}",
            marks=() if mem != TIGHT or case in TIGHT_CASES[plan] else pytest.mark.long,
        )
        for plan, mem in SERVED
        for case in CASES
    ],
    indirect=["served"],
)  # fmt: skip
def test_batches_are_the_references(graph, every_edge, served, case):
    csc, _ = graph
    endpoint, plan = served
    options = {"num_neighbors": (4, 3), "negatives": "binary", "amount": 1, "exclude": "reverse"}
    options |= {"frontier": "new", "rank": 0, "world_size": 1, "shuffle": True} | CASES[case]
    edges = every_edge
    listed = options.pop("listed", 0)
    if listed:
        rng = np.random.default_rng(listed)
        chosen = [edges[i] for i in rng.integers(0, len(edges), listed // 2)]
        back = [(target, source) for source, target in chosen]  # most are no edges of the graph
        edges = [*chosen, *back]
    asked = torch.tensor(edges).t() if listed else "all"
    data = LinkDataset(
        endpoint, asked, batch_size=BATCH * options["world_size"], seed=SEED, plan=plan,
        return_e_id=True, **options,
    )  # fmt: skip
    data.set_epoch(EPOCH)
    key = make_epoch_key(SEED, EPOCH)
    size = BATCH * options["world_size"]
    for step, batch in zip(range(6), data, strict=False):
        low, high = step * size, min(len(edges), step * size + size)
        first = low + (high - low) * options["rank"] // options["world_size"]
        last = low + (high - low) * (options["rank"] + 1) // options["world_size"]
        own = list(range(first, last))
        if options["shuffle"]:
            own = [permute(i, len(edges), key) for i in own]
        expected, ends = sample_link_batch(
            csc.indptr, csc.indices, [edges[p] for p in own], first, options["num_neighbors"],
            SEED, EPOCH, step, options["negatives"], options["amount"], options["exclude"],
            options["frontier"], options.get("replace", False), Labor.of(options),
        )  # fmt: skip
        at = At(EPOCH, step)
        at.same("input_id", batch.input_id, own)
        same_batch(at, batch, expected)
        check_fields(at, batch, ends, options)
    data.close()


def check_fields(at: At, batch, ends: list[int], options: dict) -> None:
    """PyG's fields say what the ends are."""
    num = batch.batch_size
    if options["negatives"] == "triplet":
        at.same("src_index", batch.src_index, ends[:num])
        at.same("dst_pos_index", batch.dst_pos_index, ends[num : 2 * num])
        rows = np.array(ends[2 * num :]).reshape(-1, num).T
        at.same("dst_neg_index", batch.dst_neg_index, rows[:, 0] if rows.shape[1] == 1 else rows)
        return
    half = len(ends) // 2
    at.same("edge_label_index[0]", batch.edge_label_index[0], ends[:half])
    at.same("edge_label_index[1]", batch.edge_label_index[1], ends[half:])
    if options["negatives"] == "none":
        assert batch.edge_label is None
    else:
        at.same("edge_label", batch.edge_label, [1.0] * num + [0.0] * (half - num))


@pytest.mark.parametrize(
    ("plan", "mem"), [SERVED[0], pytest.param(*SERVED[2], marks=pytest.mark.long)]
)
def test_an_epoch_has_every_edge_once_for_all_ranks_together(graph, endpoints, plan, mem):
    endpoint = endpoints[mem]
    num_edges = graph[0].indices.size
    seen, steps = [], set()
    for rank in range(3):
        data = LinkDataset(
            endpoint,
            num_neighbors=(1,),
            negatives="none",
            batch_size=9000,
            plan=plan,
            rank=rank,
            world_size=3,
        )
        batches = list(data)
        steps.add(len(batches))
        seen += [batch.input_id for batch in batches]
        data.close()
    assert steps == {-(-num_edges // 9000)}
    assert torch.cat(seen).sort().values.tolist() == list(range(num_edges))


def test_labels_and_a_state_go_along(every_edge, served):
    endpoint, plan = served
    edges = torch.tensor(every_edge[:40]).t()
    labels = torch.arange(40) % 3

    def make() -> LinkDataset:
        return LinkDataset(
            endpoint, edges, (3, 2), batch_size=8, plan=plan, seed=1, edge_label=labels
        )

    data, other = make(), make()
    batches = []
    for batch in data:
        batches.append(batch)
        if batch.step == 1:
            state = data.state_dict()
        assert batch.edge_label[:8].tolist() == (labels[batch.input_id] + 1).tolist()
        assert batch.edge_label[8:].tolist() == [0] * 8
    other.load_state_dict(state)
    rest = list(other)
    assert [b.step for b in rest] == [2, 3, 4]
    for again, batch in zip(rest, batches[2:], strict=True):
        assert torch.equal(again.n_id, batch.n_id)
        assert torch.equal(again.edge_label_index, batch.edge_label_index)
        assert torch.equal(again.edge_index, batch.edge_index)
    data.close()
    other.close()


@pytest.mark.parametrize(
    ("edges", "options", "words"),
    [
        ("test", {}, "split 'test' of edges is not in the store: it has all"),
        ([[0, 1], [2, 6500]], {}, r"edge_label_index\[1, 1\] is 6500, outside \[0, 6000\)"),
        ("all", {"relation": ("a", "b", "c")}, "relation 'a__b__c' is not in the store"),
        ("all", {"negatives": "some"}, "edges.negatives is 'some'"),
        ("all", {"amount": float("nan")}, "edges.amount is nan"),
        ("all", {"amount": 0}, "edges.amount is 0 with negatives 'binary'"),
        ("all", {"negatives": "triplet", "amount": 0.5}, "expected a whole number"),
        ("all", {"exclude": "all"}, "edges.exclude is 'all'"),
        ("all", {"reverse": ("node", "back", "node")}, "edges.reverse is 'node__back__node'"),
        ("all", {"plan": "macrobatch"}, "plan 'macrobatch': its seeds are nodes"),
    ],
)
def test_what_makes_no_sense_is_refused(served, edges, options, words):
    with pytest.raises(Refused, match=words):
        len(LinkDataset(served[0], edges, **options))


def test_ends_must_come_in_pairs():
    with pytest.raises(Refused, match=r"expected integers \(2, edges\)"):
        LinkDataset("ipc:///nowhere", torch.zeros(3, 4, dtype=torch.int64))
