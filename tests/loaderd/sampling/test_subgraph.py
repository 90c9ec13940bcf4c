"""Subgraphs out of blocks that pass through few slots, against plain Python."""

from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from loaderd.api.protocol import Subgraph
from loaderd.memory.workspace import WorkspaceFull
from loaderd.plans.base import Part
from loaderd.plans.minibatch import GraphBounds
from loaderd.plans.samplers import SAMPLERS
from loaderd.plans.subgraph import SubgraphPlan
from loaderd.sampling.subgraph import SampledGraph, SeedTable, sample_subgraph
from tests.differences import At, flat
from tests.loaderd.sampling.sampling import BATCH, NODES, SEED, TRAIN, make, parts_of
from tests.sampler_reference import TWINS, Step, induce

OFFSETS = (0, 40, 41, 200, NODES)
OPTIONS = {
    "cluster": {"partitions": 2},
    "saint-node": {"budget": 50, "num_steps": 2},
    "saint-edge": {"budget": 30, "num_steps": 2},
    "saint-walk": {"roots": 300, "length": 2, "num_steps": 2},
    "shadow": {"max_edges": 30_000},
}
FANOUTS = {"shadow": (4, 3), "induced": (3, -1), "ladies": (30, 20), "fastgcn": (60, 40)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("subgraph"))


def plan_of(parts, plan: str) -> SubgraphPlan:
    sampler, options = SAMPLERS[plan], OPTIONS.get(plan, {})
    asked = Subgraph(plan, tuple(options), tuple(options.values()), 4, sampler.trees)
    fanouts = tuple((n,) for n in FANOUTS.get(plan, (-1,)))
    resolved = structs.replace(
        parts.plan.resolved, family="subgraph", frontier="layer", fanouts=fanouts, subgraph=asked
    )
    bounds = GraphBounds(NODES, (parts.made.graph.indices.size,))
    sizes = [b - a for a, b in pairwise(OFFSETS)]
    made = SubgraphPlan(resolved, Part(), bounds, sampler.of(options))
    return made.sized(tuple(sizes), tuple(50 * size + 1000 for size in sizes))


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("slots", "share"), [(3, 1), (5, 3), (60, 60)])
def test_subgraphs_are_the_twins(made, name, slots, share):
    """Columns of four blocks with one that is held at a time, too."""
    with parts_of(made, "new", slots, share) as old:
        if slots == 60:
            old.topology.load()
        plan, seeds = plan_of(old, name), made.seeds
        parts = old._replace(plan=plan)
        work, sampler = parts.workspace(), plan.sampler
        first_edge = made.store.first_edge(made.store.manifest.relations[0])
        graph = SampledGraph(parts.topology, work, first_edge, np.array(OFFSETS))
        table = SeedTable(seeds, np.empty(TRAIN, np.int64))
        for number in range(plan.num_steps):
            unit = plan.unit(1, number)
            at = Step(
                made.graph.indptr, made.graph.indices, OFFSETS, FANOUTS.get(name, ()), SEED, 1,
                number, plan.num_steps,
            )  # fmt: skip
            options = {k: v for k, v in OPTIONS.get(name, {}).items() if k != "max_edges"}
            if sampler.rooted:
                roots = parts.roots(unit)
                assert roots.nodes.size == BATCH
            else:
                nodes = np.unique(TWINS[name](at, [], 0, **options))
                places = table.among(nodes)
                wanted = [v for v in nodes.tolist() if v in seeds.tolist()]
                assert seeds[places].tolist() == wanted
                roots = parts.roots(unit)._replace(nodes=seeds[places], places=places)
            if (name, number) not in made.known:  # it is made once for all numbers of slots
                made.known[name, number] = induce(
                    at,
                    roots.nodes.tolist(),
                    lambda known, hop, at=at, given=options: TWINS[name](at, known, hop, **given),
                    sampler.trees,
                    len(FANOUTS[name]) if sampler.layered else 0,
                )
            expected = made.known[name, number]
            found = sample_subgraph(parts.topology, graph, plan, unit, work, roots)
            where, n_id = At(1, number), expected.n_id
            where.same("n_id", work.n_id[: found.num_nodes], n_id, n_id)
            where.same("nodes_per_hop", list(found.nodes_per_hop), expected.nodes_per_hop)
            where.same("local", work.local[: found.num_edges], flat(expected.src_local))
            where.same("edge ids", work.records[: found.num_edges, 0], flat(expected.edges))
            where.same("edges_per_hop", [e for (e,) in found.edges_per_hop],
                       [len(hop) for hop in expected.edges])  # fmt: skip
            if sampler.trees:
                where.same("trees", work.trees[: found.num_nodes], expected.trees)


def test_workspaces_are_left_as_they_were(made):
    """A subgraph that has no room, then the same one with room."""
    with parts_of(made, "new", 5, 3) as old:
        parts = old._replace(plan=plan_of(old, "induced"))
        work, plan = parts.workspace(), parts.plan
        first_edge = made.store.first_edge(made.store.manifest.relations[0])
        graph = SampledGraph(parts.topology, work, first_edge, np.array(OFFSETS))
        unit = plan.unit(0, 0)
        roots = parts.roots(unit)
        whole = sample_subgraph(parts.topology, graph, plan, unit, work, roots)
        maximum, work.draws = work.draws, work.draws[: whole.num_edges - 1]
        with pytest.raises(WorkspaceFull):
            sample_subgraph(parts.topology, graph, plan, unit, work, roots)
        work.draws = maximum
        assert sample_subgraph(parts.topology, graph, plan, unit, work, roots) == whole
