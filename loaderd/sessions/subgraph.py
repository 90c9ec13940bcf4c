"""Plans of subgraphs: a sampler chooses the nodes of each batch, which has all edges among them."""

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import BatchFailed
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import ServedRows
from loaderd.memory.workspace import WorkspaceFull
from loaderd.plans.roots import node_roots
from loaderd.plans.subgraph import SubgraphPlan
from loaderd.sampling.structure import Structure
from loaderd.sampling.subgraph import SAMPLED, SampledGraph, SeedTable, sample_subgraph
from loaderd.sessions.base import Kind, StoreResources
from loaderd.sessions.build import BatchSpec
from loaderd.sessions.minimum import least_slots
from loaderd.sessions.sampled import SampledSession
from loaderd.sessions.session import BatchInProgress
from loaderd.sessions.sizing import (
    FEWER_EDGES,
    BatchMemory,
    ask,
    check_possible,
    cut_session,
    explained_shortage,
    fit,
    resolve_sampled,
    take_memory,
    take_seeds,
)


class SubgraphSession(SampledSession):
    """Batches of the nodes that a sampler chooses."""

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        spec: BatchSpec,
        served: list[ServedRows],
        memory: BatchMemory,
        offsets: NDArray[np.int64],
        table: SeedTable | None,
    ) -> None:
        """`table`: of the seeds, of a sampler that does not begin at them."""
        super().__init__(resources, number, spec, served, memory)
        assert isinstance(spec.plan, SubgraphPlan)
        self._chooser, self._offsets, self._table = spec.plan, offsets, table
        store = resources.store
        self._first_edge = store.first_edge(store.manifest.relations[SAMPLED])

    def _structure(self, job: BatchInProgress) -> Structure:
        topology, spec, plan = self._resources.topology, self._spec, self._chooser
        unit, work, chosen = job.unit, job.workspace, None
        graph = SampledGraph(topology, work, self._first_edge, self._offsets)
        try:
            if self._table is None:
                (roots,) = self._resources.builder.roots(spec, [unit])
            else:
                none = np.empty(0, np.int64)
                chosen = plan.sampler.choose(plan.draws(unit, 0), graph, none)
                chosen = chosen._replace(nodes=np.unique(chosen.nodes))
                roots = node_roots(spec.seeds, self._table.among(chosen.nodes))
            return sample_subgraph(topology, graph, plan, unit, work, roots, chosen)
        except WorkspaceFull:
            raise BatchFailed(
                f"step {unit.step}: the subgraph has more nodes or edges than the "
                f"{plan.shape().nodes} and {plan.shape().total_edges} that there is memory for; "
                "ask for more by subgraph={'max_edges': ...}"
            ) from None


def open_subgraphs(
    resources: StoreResources, number: int, request: Attach, frame: NDArray[np.int64] | None
) -> SubgraphSession:
    """Take memory for a session, and open it.  Raises Refused, StoreError."""
    asked = ask(resources, request, frame, request.plan)
    plan, offsets = asked.plan, np.empty(0, np.int64)
    assert isinstance(plan, SubgraphPlan)
    if resources.store.manifest.types[0].num_partitions:
        offsets = partition_offsets(resources)
        plan = plan.sized(*partition_sizes(resources, offsets))
        asked = asked._replace(plan=plan)
    rooted = plan.sampler.rooted
    places = 0 if rooted else -(-8 * plan.resolved.num_seeds // resources.budget.slot_bytes)
    need, sizes, available = fit(resources, asked, places, FEWER_EDGES)
    settings, row_blocks = resources.settings, resources.budget.row_blocks
    cut = cut_session(need, available, row_blocks, settings, asked.window(settings))
    with explained_shortage(resources, need.least + places), resources.allocation() as allocation:
        spec, table = take_seeds(resources, allocation, asked, need, sizes), None
        if not rooted:
            run = allocation.run(places).view(np.int64)
            table = SeedTable(spec.seeds, run[: spec.seeds.size])
        memory = take_memory(resources, allocation, plan, sizes, cut)
        resources.load_graph()
    return SubgraphSession(resources, number, spec, asked.served, memory, offsets, table)


def partition_offsets(resources: StoreResources) -> NDArray[np.int64]:
    """First store id of each partition, then the number of nodes."""
    store = resources.store
    return store.partition_offsets(store.manifest.types[0]).astype(np.int64)


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
    most = edges[np.minimum(last, relation.num_blocks)] - edges[first]
    return tuple(np.diff(offsets).tolist()), tuple(most.astype(np.int64).tolist())


SUBGRAPH = Kind(resolve_sampled, least_slots, open_subgraphs, check_possible, every_rank=True)
