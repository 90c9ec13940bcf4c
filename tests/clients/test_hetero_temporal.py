"""Batches of several types up to a time, each relation with its own times, against plain Python."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from clients.link import HeteroLinkDataset  # noqa: E402
from clients.torch import HeteroDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.differences import At, same_hetero_batch  # noqa: E402
from tests.heterostores import EdgeType, HeteroGraph, random_hetero, write_hetero_store  # noqa: E402
from tests.reference import (  # noqa: E402
    draw_negatives,
    make_epoch_key,
    permute,
    sample_hetero_trees,
    tree_number,
)

SEED, BATCH, EPOCH = 3, 8, 2
CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")
TAGS = ("tag", "tags", "paper")  # without times: it can only be left out
RELATIONS: tuple[EdgeType, ...] = (CITES, WRITES, WRITTEN, TAGS)
NODES = {"author": 90, "paper": 120, "tag": 5}
WIDTHS = {"author": 3, "paper": 300}
FANOUTS = {CITES: (3, 2, 2), WRITES: (4, 0, 3), WRITTEN: (0, 3, 2), TAGS: (0, 0, 0)}
SERVED = [("minibatch", "16M"), ("hyperbatch", "16M"), ("auto", "2M")]  # all in memory, or little


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Columns from none to several blocks, many equal times; and their store."""
    rng = np.random.default_rng(1)
    made = random_hetero(rng, NODES, RELATIONS, 12, WIDTHS, "paper", 2500)
    columns = made.relations.items()
    times = {r: rng.integers(-5, 40, edges.size) << 40 for r, (_, edges) in columns if r != TAGS}
    made = made._replace(times=times)
    store = tmp_path_factory.mktemp("timed") / "store"
    write_hetero_store(store, made)
    return made, store


@pytest.fixture(scope="module")
def endpoints(graph):
    """By budget."""
    with daemon(graph[1], "16M", 2) as roomy, daemon(graph[1], "2M", 2) as tight:
        yield {"16M": roomy, "2M": tight}


@pytest.fixture(params=SERVED, ids=lambda p: p[0])
def served(request, endpoints):
    """An endpoint, and the plan to ask for."""
    plan, mem = request.param
    return endpoints[mem], plan


def check(graph: HeteroGraph, batch, expected) -> None:
    """The batch is the reference's, but for whose its nodes are."""
    hops = {
        relation: tuple([[edge[part] for edge in hop] for hop in hops] for part in range(3))
        for relation, hops in expected.edges.items()
    }
    x = {name: graph.x(name) for name in WIDTHS}
    same_hetero_batch(At(batch.epoch, batch.step), batch, expected, hops, x)


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize(("frontier", "strict"), [("new", False), ("layer", True)])
def test_nodes_see_what_was_before_their_seed(graph, served, strategy, frontier, strict):
    made, _ = graph
    endpoint, plan = served
    rng = np.random.default_rng(4)
    nodes = rng.integers(0, NODES["paper"], 20)
    nodes[:3] = nodes[3]
    seed_times = rng.choice(made.times[CITES], nodes.size)
    data = HeteroDataset(
        endpoint, "", FANOUTS, BATCH, seed=SEED, plan=plan, input_type="paper", input_nodes=nodes,
        input_time=seed_times, temporal_strategy=strategy, strict=strict, frontier=frontier,
        return_e_id=True,
    )  # fmt: skip
    data.set_epoch(EPOCH)
    key = make_epoch_key(SEED, EPOCH)
    batches = list(data)
    data.close()
    assert [batch.step for batch in batches] == [0, 1, 2]
    for step, batch in enumerate(batches):
        own = range(step * BATCH, min(nodes.size, step * BATCH + BATCH))
        places = [permute(i, nodes.size, key) for i in own]
        expected = sample_hetero_trees(
            made.first, made.relations, made.times, [("paper", int(n)) for n in nodes[places]],
            [int(t) - strict for t in seed_times[places]], [tree_number(i) for i in own], FANOUTS,
            (SEED, EPOCH, step), strategy == "last", frontier,
        )  # fmt: skip
        check(made, batch, expected)
        assert batch.input_id.tolist() == places
        assert batch.seed_time.tolist() == seed_times[places].tolist()
        assert {t: b.tolist() for t, b in batch.batch.items()} == expected.trees
        assert sum(map(len, expected.edges[WRITTEN])) > 0


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_edges_see_what_was_before_them(graph, served, strategy):
    made, _ = graph
    endpoint, plan = served
    data = HeteroLinkDataset(
        endpoint, "all", FANOUTS, BATCH, seed=SEED, plan=plan, relation=WRITES, return_e_id=True,
        amount=1, edge_label_time="own", temporal_strategy=strategy,
    )  # fmt: skip
    data.set_epoch(EPOCH)
    indptr, indices = made.relations[WRITES]
    targets = np.repeat(np.arange(NODES["paper"]), np.diff(indptr))
    key = make_epoch_key(SEED, EPOCH)
    for step, batch in zip(range(2), data, strict=False):
        own = range(step * BATCH, step * BATCH + BATCH)
        places = [permute(i, indices.size, key) for i in own]
        drawn = [
            draw_negatives(SEED, EPOCH, step, own.start, BATCH, BATCH, end, range(NODES[name]))
            for end, name in enumerate(("author", "paper"))
        ]
        authors, papers = (indices[places].tolist(), drawn[0]), (targets[places].tolist(), drawn[1])
        ends = [
            (kind, node, end)
            for end, (kind, nodes) in enumerate(
                [*(("author", nodes) for nodes in authors), *(("paper", nodes) for nodes in papers)]
            )
            for node in nodes
        ]
        own_times = made.times[WRITES][places].tolist()
        expected = sample_hetero_trees(
            made.first, made.relations, made.times, [end[:2] for end in ends],
            [t - 1 for t in own_times] * 4,
            [tree_number(own[i % BATCH], end) for i, (_, _, end) in enumerate(ends)], FANOUTS,
            (SEED, EPOCH, step), strategy == "last",
        )  # fmt: skip
        check(made, batch, expected)
        edge_of = {t: [tree % BATCH for tree in trees] for t, trees in expected.trees.items()}
        assert {t: b.tolist() for t, b in batch.batch.items()} == edge_of
        assert batch.input_id.tolist() == places
        assert batch.edge_label_time.tolist() == own_times * 2
        assert batch.edge_label_index.tolist() == [list(range(2 * BATCH))] * 2
    data.close()


def test_a_relation_that_is_sampled_must_have_times(served):
    data = HeteroDataset(served[0], "train", (2,), input_type="paper", input_time=range(60))
    with pytest.raises(Refused, match="relation 'tag__tags__paper' has no times"):
        len(data)
