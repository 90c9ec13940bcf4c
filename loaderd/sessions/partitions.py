"""Plan `partitions`: a batch has all seeds of some partitions, and expands only their nodes.

Batches are sampled as plain minibatches are, from the whole graph; seeds are dealt out as those of
macro-batches.
"""

import numpy as np
from numpy.typing import NDArray

from loaderd.api.contents import PartitionSeeds
from loaderd.memory.workspace import Workspace
from loaderd.plans.base import Unit
from loaderd.plans.macrobatch import SeedGroups
from loaderd.plans.partitions import PartitionPlan
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Kind, SessionRequest, StoreResources
from loaderd.sessions.build import BatchSpec, sample_from
from loaderd.sessions.sampled import Sample, SampledSession, open_session
from loaderd.sessions.sizing import ask, min_slots, resolve_sampled


def open_partitions(resources: StoreResources, opening: SessionRequest) -> SampledSession:
    """Take memory for a session, and open it.  Raises Refused, StoreError."""
    asked = ask(resources, opening, PartitionPlan.name)
    (node_type,) = resources.store.manifest.types
    offsets = resources.store.partition_offsets(node_type).astype(np.int64)
    assert isinstance(asked.plan, PartitionPlan)
    asked = asked._replace(plan=asked.plan.sized(offsets))

    def prepare(spec: BatchSpec, order: NDArray[np.int64]) -> tuple[BatchSpec, Sample]:
        assert isinstance(spec.plan, PartitionPlan)
        groups = SeedGroups(spec.seeds, offsets, order)
        plan = spec.plan.placed(groups.counts)

        def sample(unit: Unit, work: Workspace) -> Structure:
            inner = plan.inner_ranges(unit.epoch, unit.macro, offsets)
            roots = groups.roots(plan, unit, spec.seeds)
            return sample_from(resources.topology.within(inner), plan, unit, work, roots)

        dealt = PartitionSeeds(tuple(offsets.tolist()), tuple(groups.counts.tolist()))
        return spec._replace(plan=plan, partitions=dealt), sample

    return open_session(resources, opening.number, asked, prepare, True, "fewer macro_partitions")


PARTITIONS = Kind(resolve_sampled, min_slots, open_partitions, every_rank=True)
