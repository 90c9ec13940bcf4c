"""Plans of subgraphs end to end against plain Python, for any memory, threads, ranks, restarts."""

import re
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from clients.link import LinkDataset
from clients.torch import NeighborDataset
from loaderd.api.errors import BatchFailed, Refused
from loaderd.plans.samplers import SAMPLERS
from tests.daemons import ROOT, daemon
from tests.differences import At, flat, same_batch
from tests.graphs import OFFSETS, Csc, spread_csc
from tests.reference import make_epoch_key, permute, sample_edges
from tests.sampler_reference import TWINS, Step, induce
from tests.stores import write_store

SEED, BATCH, EPOCH = 3, 40, 2
SEEDS = [*range(0, 400, 3), 17, 5]
BUDGETS = (("3M", 1), ("12M", 4), ("64M", 2))
OPTIONS: dict[str, dict[str, int]] = {
    "cluster": {"partitions": 2},
    "saint-node": {"budget": 60, "num_steps": 4},
    "saint-edge": {"budget": 30, "num_steps": 3},
    "saint-walk": {"roots": 300, "length": 3, "num_steps": 3},
    "shadow": {"max_edges": 20_000},
}
FANOUTS = {"shadow": (4, 3), "induced": (3, -1), "ladies": (30, 20), "fastgcn": (60, 40)}


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> tuple[Csc, np.ndarray, Path]:
    """Columns from none to several blocks of 4 KiB, self-loops and parallel edges, partitions."""
    csc, weights = spread_csc(np.random.default_rng(1))
    store = tmp_path_factory.mktemp("subgraphs") / "store"
    write_store(store, csc, SEEDS, weights=weights, offsets=OFFSETS)
    return csc, weights, store


@pytest.fixture(scope="module")
def endpoint_of(graph):
    """Of a daemon with such a budget."""
    with ExitStack() as daemons:

        @cache
        def endpoint(mem: str, workers: int) -> str:
            return daemons.enter_context(daemon(graph[2], mem, workers))

        yield endpoint


@pytest.fixture(params=BUDGETS, ids=[mem for mem, _ in BUDGETS])
def endpoint(request, endpoint_of):
    """With little memory, with more, and with room for all."""
    return endpoint_of(*request.param)


def with_budget(*chosen: str) -> pytest.MarkDecorator:
    """With other ones --long; that budgets change no batch, the first test of a sampler shows."""
    params = [
        pytest.param(budget, id=budget[0], marks=() if budget[0] in chosen else pytest.mark.long)
        for budget in BUDGETS
    ]
    return pytest.mark.parametrize("endpoint", params, indirect=True)


@pytest.fixture(scope="module")
def expected_of(graph):
    """`expected_step` of the graph, made once for all budgets."""
    return cache(partial(expected_step, graph[0]))


def dataset(endpoint: str, plan: str, **more: Any) -> NeighborDataset:
    asked: dict[str, Any] = {"batch_size": BATCH, "seed": SEED, "plan": plan, "return_e_id": True}
    asked |= {"subgraph": OPTIONS.get(plan, {}), "num_neighbors": FANOUTS.get(plan, (5,))}
    return NeighborDataset(endpoint, **(asked | more))


def expected_step(csc: Csc, plan: str, step: int, total: int, rank: int = 0, world: int = 1) -> Any:
    """(places of the seeds, batch) that the naive twin makes."""
    sampler, choose = SAMPLERS[plan], TWINS[plan]
    at = Step(
        csc.indptr, csc.indices, OFFSETS, FANOUTS.get(plan, ()), SEED, EPOCH,
        step * world + rank, total * world,
    )  # fmt: skip
    options = {name: n for name, n in OPTIONS.get(plan, {}).items() if name != "max_edges"}
    if sampler.rooted:
        key, low = make_epoch_key(SEED, EPOCH), step * BATCH
        size = min(len(SEEDS), low + BATCH) - low
        own = range(low + size * rank // world, low + size * (rank + 1) // world)
        places = [permute(i, len(SEEDS), key) for i in own]
    else:
        nodes = sorted({int(node) for node in choose(at, [], 0, **options)})
        places = [SEEDS.index(node) for node in nodes if node in SEEDS]
    batch = induce(
        at,
        [SEEDS[place] for place in places],
        lambda known, hop: choose(at, known, hop, **options),
        sampler.trees,
        len(FANOUTS[plan]) if sampler.layered else 0,
    )
    return places, batch


class SamplerConformance:
    """What holds of every sampler."""

    plan: ClassVar[str]

    def check_epoch(
        self, graph: Any, expected_of: Any, endpoint: str, rank: int = 0, world: int = 1
    ) -> None:
        csc, weights, _ = graph
        data = dataset(endpoint, self.plan, rank=rank, world_size=world, edge_weights=True)
        data.set_epoch(EPOCH)
        batches = list(data)
        assert len(batches) == len(data) > 0
        data.close()
        for batch in batches:
            at = At(EPOCH, batch.step)
            places, expected = expected_of(self.plan, batch.step, len(data), rank, world)
            at.same("input_id", batch.input_id, places)
            assert batch.batch_size == len(places)
            same_batch(at, batch, expected, np.arange(csc.indices.size))
            at.same("edge_weight", batch.edge_weight, weights[flat(expected.edges)])
            if SAMPLERS[self.plan].trees:
                at.same("batch", batch.batch, expected.trees, expected.n_id)
            else:
                assert batch.batch is None

    def test_batches_are_those_of_the_twin(self, graph, expected_of, endpoint):
        self.check_epoch(graph, expected_of, endpoint)

    @with_budget("3M")
    def test_ranks_have_batches_of_their_own(self, graph, expected_of, endpoint):
        for rank in range(2):
            self.check_epoch(graph, expected_of, endpoint, rank, 2)

    @with_budget("12M")
    def test_a_run_left_anywhere_goes_on_as_if_it_had_not_been(self, endpoint):
        data = dataset(endpoint, self.plan)
        whole = [batch.edge_index.tolist() for batch in data]
        data.set_epoch(0)
        it = iter(data)
        next(it)
        again = dataset(endpoint, self.plan)
        again.load_state_dict(data.state_dict())
        assert [batch.edge_index.tolist() for batch in again] == whole[1:]
        again.close()
        data.close()


class TestCluster(SamplerConformance):
    plan = "cluster"

    def test_each_node_comes_once_in_an_epoch(self, endpoint):
        data = dataset(endpoint, self.plan)
        for _ in range(2):
            assert sorted(n for batch in data for n in batch.n_id.tolist()) == list(range(400))
        data.close()


class TestSaintNode(SamplerConformance):
    plan = "saint-node"


class TestSaintEdge(SamplerConformance):
    plan = "saint-edge"


class TestSaintWalk(SamplerConformance):
    plan = "saint-walk"


class TestShadow(SamplerConformance):
    plan = "shadow"


class TestInduced(SamplerConformance):
    plan = "induced"


class TestLadies(SamplerConformance):
    plan = "ladies"


class TestFastGcn(SamplerConformance):
    plan = "fastgcn"


def snippets() -> list[str]:
    """Of docs/samplers.md."""
    text = (ROOT / "docs" / "samplers.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_documents_sampler_is_served_by_a_daemon(graph, tmp_path, monkeypatch):
    """A user's own class, in a module of its own, against its twin for each budget."""
    (tmp_path / "my_samplers.py").write_text(snippets()[-1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    csc, _, store = graph
    found = []
    for mem, workers in BUDGETS:
        with daemon(store, mem, workers, "--samplers", "my_samplers:Stars") as own:
            data = dataset(own, "stars", subgraph={"centers": 30, "leaves": 3})
            data.set_epoch(EPOCH)
            found.append(list(data))
            data.close()
    for step, batches in enumerate(zip(*found, strict=True)):
        at = Step(csc.indptr, csc.indices, OFFSETS, (), SEED, EPOCH, step, 14)
        centers = at.below(400, 30)
        edges = [e for v in centers for e in sample_edges(csc.indptr, v, 3, at.key(1))]
        nodes = {*centers, *(int(csc.indices[e]) for e in edges)}
        roots = [node for node in sorted(nodes) if node in SEEDS]
        expected = induce(at, roots, lambda known, hop, nodes=nodes: nodes, False, 0)
        for batch in batches:
            same_batch(At(EPOCH, step), batch, expected, np.arange(csc.indices.size))
    assert step == 13
    broken = "my_samplers:Sun", "no_such_module:Stars", "my_samplers"
    for place in broken:
        with (
            pytest.raises(AssertionError, match="expected MODULE:CLASS"),
            daemon(store, "8M", 1, "--samplers", place),
        ):
            pass


@with_budget("12M")
def test_the_documents_norms_of_saint_are_what_was_counted(graph, endpoint):
    norms: dict[str, Any] = {"endpoint": endpoint}
    exec(snippets()[1], norms)
    data = dataset(endpoint, "saint-walk", subgraph={"roots": 100, "length": 2}, seed=0)
    data.set_epoch(1_000_003)
    batch = next(iter(data))
    data.close()
    counts = norms["nodes"]
    assert (counts[batch.n_id] >= 1).all()
    assert counts.sum() > norms["total"] >= 20
    weights = norms["edge_weights"](batch)
    expected = counts[batch.n_id[batch.edge_index[1]]] / norms["edges"][batch.e_id]
    assert weights.tolist() == expected.tolist()
    assert (weights >= 1).all()


@with_budget("3M")
def test_a_run_is_refused_by_a_line_that_says_what_to_do(graph, endpoint, tmp_path):
    for plan, more, line in (
        ("cluster", {"subgraph": {"parts": 2}}, "plan 'cluster': found the option 'parts', "
         "expected some of max_edges, partitions"),
        ("cluster", {"subgraph": {"partitions": -1}}, "partitions is -1, expected 0 to"),
        ("cluster", {"subgraph": {"partitions": 0}}, "0 of the store's 7 partitions a batch"),
        ("cluster", {"world_size": 8}, "7 partitions cannot be dealt out to 8 ranks"),
        ("saint-node", {"subgraph": {"budget": 0}}, "subgraphs of 0 nodes of a graph of"),
        ("ladies", {"num_neighbors": (-1,)}, "fanouts \\[-1\\], expected the number of nodes"),
        ("ladies", {"num_neighbors": ()}, "num_neighbors has 0 hops"),
        ("induced", {"weighted": True}, "found replace, weighted or labor"),
        ("minibatch", {"subgraph": {"budget": 3}}, "subgraph: found plan 'minibatch', expected"),
        ("saint-node", {"subgraph": {"budget": 400, "max_edges": 1 << 40}},
         "or ask for smaller subgraphs, or subgraph={.max_edges.: fewer}"),
    ):  # fmt: skip
        with pytest.raises(Refused, match=line):
            len(dataset(endpoint, plan, **more))
    with pytest.raises(Refused, match="plan 'induced': found edges as seeds, expected nodes"):
        len(LinkDataset(endpoint, "all", (3,), 10, plan="induced"))
    few = dataset(endpoint, "saint-edge", subgraph={"budget": 200, "max_edges": 300})
    with pytest.raises(BatchFailed, match="step 0: the subgraph has more nodes or edges than"):
        list(few)
    write_store(tmp_path / "plain", graph[0], SEEDS)
    with daemon(tmp_path / "plain") as plain, pytest.raises(Refused, match="0 partitions a batch"):
        len(dataset(plain, "cluster"))


def test_every_sampler_conforms():
    tested = {found.plan for found in SamplerConformance.__subclasses__()}
    assert tested == set(SAMPLERS) == set(TWINS)
