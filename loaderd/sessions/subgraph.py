"""Plans of subgraphs: a sampler chooses the nodes of each batch, which has all edges among them."""

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import BatchFailed
from loaderd.memory.workspace import Workspace, WorkspaceFull
from loaderd.plans.base import Unit
from loaderd.plans.roots import node_roots
from loaderd.plans.subgraph import SubgraphPlan
from loaderd.sampling.structure import Structure
from loaderd.sampling.subgraph import SAMPLED, SampledGraph, SeedTable, sample_subgraph
from loaderd.sessions.base import Kind, SessionRequest, StoreResources
from loaderd.sessions.build import BatchSpec
from loaderd.sessions.sampled import Sample, SampledSession, open_session
from loaderd.sessions.sizing import FEWER_EDGES, ask, check_possible, min_slots, resolve_sampled


def open_subgraphs(resources: StoreResources, opening: SessionRequest) -> SampledSession:
    """Take memory for a session, and open it.  Raises Refused, StoreError."""
    asked = ask(resources, opening, opening.request.plan)
    store, plan, offsets = resources.store, asked.plan, np.empty(0, np.int64)
    first_edge = store.first_edge(store.manifest.relations[SAMPLED])
    assert isinstance(plan, SubgraphPlan)
    if store.manifest.types[0].num_partitions:
        offsets = store.partition_offsets(store.manifest.types[0]).astype(np.int64)
        plan = plan.sized(*partition_sizes(resources, offsets))
        asked = asked._replace(plan=plan)

    def prepare(spec: BatchSpec, order: NDArray[np.int64]) -> tuple[BatchSpec, Sample]:
        table = None if plan.sampler.rooted else SeedTable(spec.seeds, order)

        def sample(unit: Unit, work: Workspace) -> Structure:
            graph = SampledGraph(resources.topology, work, first_edge, offsets)
            chosen, none = None, np.empty(0, np.int64)
            try:
                if table is None:
                    (roots,) = resources.builder.roots(spec, [unit])
                else:
                    chosen = plan.sampler.choose(plan.draws(unit, 0), graph, none)
                    chosen = chosen._replace(nodes=np.unique(chosen.nodes))
                    roots = node_roots(spec.seeds, table.among(chosen.nodes))
                return sample_subgraph(resources.topology, graph, plan, unit, work, roots, chosen)
            except WorkspaceFull:
                raise BatchFailed(
                    f"step {unit.step}: the subgraph has more nodes or edges than the "
                    f"{plan.shape().nodes} and {plan.shape().total_edges} that there is memory "
                    "for; ask for more by subgraph={'max_edges': ...}"
                ) from None

        return spec, sample

    return open_session(
        resources, opening.number, asked, prepare, not plan.sampler.rooted, FEWER_EDGES
    )


def partition_sizes(
    resources: StoreResources, offsets: NDArray[np.int64]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(nodes, in-edges) of each partition; edges of blocks at its ends count as a whole."""
    store = resources.store
    relation = store.manifest.relations[SAMPLED]
    starts, edges = store.first_node(relation).astype(np.int64), store.first_edge(relation)
    if not relation.num_blocks:
        return tuple(np.diff(offsets).tolist()), (0,) * (offsets.size - 1)
    first = np.maximum(np.searchsorted(starts, offsets[:-1], "right") - 1, 0)
    last = np.searchsorted(starts, offsets[1:], "left")
    maximum = edges[np.minimum(last, relation.num_blocks)] - edges[first]
    return tuple(np.diff(offsets).tolist()), tuple(maximum.astype(np.int64).tolist())


SUBGRAPH = Kind(resolve_sampled, min_slots, open_subgraphs, check_possible, every_rank=True)
