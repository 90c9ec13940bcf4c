"""Plan `partitions`: each batch has all seeds of some partitions, whose nodes alone are expanded.

Batches are sampled as plain minibatches are, from the whole graph; seeds are dealt out as those of
macro-batches.
"""

from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from loaderd.api.contents import PartitionSeeds
from loaderd.api.protocol import Attach, Attached
from loaderd.memory.ledger import ServedRows
from loaderd.plans.macrobatch import SeedGroups
from loaderd.plans.partitions import PartitionPlan
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Kind, StoreResources
from loaderd.sessions.build import BatchSpec, sample_from
from loaderd.sessions.minimum import least_slots
from loaderd.sessions.sampled import SampledSession
from loaderd.sessions.session import BatchInProgress
from loaderd.sessions.sizing import (
    BatchMemory,
    ask,
    cut_session,
    explained_shortage,
    fit,
    resolve_sampled,
    take_memory,
    take_seeds,
)


class _Dealt(NamedTuple):
    """What is dealt out in an epoch."""

    groups: SeedGroups
    offsets: NDArray[np.int64]  # (partitions + 1,) first node of each, then the end


class PartitionSession(SampledSession):
    """Batches of the whole graph around the seeds of some partitions."""

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        spec: BatchSpec,
        served: list[ServedRows],
        memory: BatchMemory,
        dealt: _Dealt,
    ) -> None:
        super().__init__(resources, number, spec, served, memory)
        assert isinstance(spec.plan, PartitionPlan)
        self._dealer, self._dealt = spec.plan, dealt

    def _structure(self, job: BatchInProgress) -> Structure:
        unit, dealer, (groups, offsets) = job.unit, self._dealer, self._dealt
        roots = groups.roots(dealer, unit, self._spec.seeds)
        inner = dealer.inner_ranges(unit.epoch, unit.macro, offsets)
        graph = self._resources.topology.within(inner)
        return sample_from(graph, dealer, unit, job.workspace, roots)

    def describe(self, request: int) -> Attached:
        groups, offsets = self._dealt
        partitions = PartitionSeeds(tuple(offsets.tolist()), tuple(groups.counts.tolist()))
        return structs.replace(super().describe(request), partitions=partitions)


def open_partitions(
    resources: StoreResources, number: int, request: Attach, frame: NDArray[np.int64] | None
) -> PartitionSession:
    """Take memory for a session, and open it.  Raises Refused, StoreError."""
    asked = ask(resources, request, frame, PartitionPlan.name)
    assert isinstance(asked.plan, PartitionPlan)
    (node_type,) = resources.store.manifest.types
    offsets = resources.store.partition_offsets(node_type).astype(np.int64)
    asked = asked._replace(plan=asked.plan.sized(offsets))
    places = -(-8 * asked.plan.resolved.num_seeds // resources.budget.slot_bytes)
    need, sizes, available = fit(resources, asked, places, "fewer macro_partitions")
    settings, row_blocks = resources.settings, resources.budget.row_blocks
    cut = cut_session(need, available, row_blocks, settings, asked.window(settings))
    with explained_shortage(resources, need.least + places), resources.allocation() as allocation:
        spec = take_seeds(resources, allocation, asked, need, sizes)
        run = allocation.run(places).view(np.int64)
        groups = SeedGroups(spec.seeds, offsets, run[: spec.seeds.size])
        assert isinstance(spec.plan, PartitionPlan)
        spec = spec._replace(plan=spec.plan.placed(groups.counts))
        memory = take_memory(resources, allocation, spec.plan, sizes, cut)
        resources.load_graph()
    return PartitionSession(resources, number, spec, asked.served, memory, _Dealt(groups, offsets))


PARTITIONS = Kind(resolve_sampled, least_slots, open_partitions, every_rank=True)
