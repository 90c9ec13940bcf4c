"""Building one batch in a worker thread: sample and address, then fill what was placed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import align
from blockstore.io.arena import Arena
from blockstore.kernels.order import take_ids
from blockstore.kernels.records import EdgeRecord
from blockstore.owners import OwnerMap
from loaderd.api.contents import PartitionSeeds
from loaderd.api.errors import BatchFailed
from loaderd.api.protocol import BatchReady, RowGroup
from loaderd.memory.blob import ALIGN, Written, joined, made, part, write_blob
from loaderd.memory.workspace import Workspace, WorkspaceFull
from loaderd.plans.base import Plan, Unit
from loaderd.plans.home import RANK_BYTES, place_seeds
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.plans.partitions import PartitionPlan
from loaderd.plans.roots import EndTable, Roots, edge_roots, node_roots, seed_places, timed_roots
from loaderd.sampling.macrobatch.graph import MacroGraph
from loaderd.sampling.records import section, written_section
from loaderd.sampling.rows import RowAssembler
from loaderd.sampling.structure import HeldBlocks, Structure, StructureArrays, structure_arrays
from loaderd.sampling.topology import Topology
from loaderd.sessions.session import BatchInProgress, Placement

# sections of edges' records that batches bring, and what they are called there
_SENT = {"ids": "e_id", "weights": "edge_weight", "times": "edge_time"}


class BatchSpec(NamedTuple):
    """What fixes the batches of a session: its plan and its seeds."""

    plan: MinibatchPlan
    seeds: NDArray[Any]  # id_dtype: store ids, in the order given; of edges: see `ends`
    times: NDArray[np.int64]  # of the seeds, if the client gave them
    ends: EndTable | None  # if the seeds are edges
    record: EdgeRecord  # what comes with each edge
    owners: OwnerMap | None = None  # of the nodes, if batches name owners
    partitions: PartitionSeeds | None = None  # of plan `partitions`


def sample_from(
    graph: Topology | MacroGraph, plan: Plan, unit: Unit, work: Workspace, roots: Roots
) -> Structure:
    """Structure of a batch, into a workspace.

    Raises WorkspaceFull: the workspace is a small one, the batch a large one; BatchFailed.
    """
    try:
        return graph.sample(plan, unit, work, roots)
    except WorkspaceFull:
        if work.small:
            raise
        raise BatchFailed(
            "a batch finds more edges than there are: with fanout -1 make the seeds distinct"
        ) from None


class Builder:
    """The two steps of a batch.  Holds no state of its own."""

    def __init__(
        self, topology: Topology, assembler: RowAssembler, arena: Arena, original: NDArray[Any]
    ) -> None:
        """`original`: id_dtype (num_nodes,), store id -> id in the source."""
        self._topology, self._assembler = topology, assembler
        self._data, self._slot_bytes = arena.data, arena.slot_bytes
        self._original = original

    def roots(
        self, spec: BatchSpec, units: Sequence[Unit], held: HeldBlocks | None = None
    ) -> list[Roots]:
        """Where batches begin.

        held   gives blocks of the graph, where edges are looked up; None: as workers hold them
        """
        plan, table, topology = spec.plan, spec.ends, self._topology
        if table is not None:
            relation, first_edge = table.relation, table.first_edge
            timed = plan.resolved.temporal is not None and not spec.times.size
            return edge_roots(
                table, plan, units, spec.times,
                lambda index: topology.find_edges(relation, first_edge, index, timed, held),
            )  # fmt: skip
        found = []
        for unit in units:
            index = np.empty(unit.num_seeds, np.int64)
            seed_places(plan, unit, index)
            if unit.rank >= 0:
                index = index[self._seed_ranks(spec, index) == unit.rank]
            if plan.resolved.temporal is None:
                found.append(node_roots(spec.seeds, index))
            else:
                found.append(timed_roots(plan, unit, spec.seeds, spec.times, index))
        return found

    def _seed_ranks(self, spec: BatchSpec, places: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Which rank trains each seed of a global batch, whose places are given."""
        owners, part = spec.owners, spec.plan.part
        assert owners is not None
        assert part.home is not None
        own = owners.owner[spec.seeds[places]]
        return place_seeds(own, part.world_size, part.home.time_steps)

    def structure(self, spec: BatchSpec, unit: Unit, work: Workspace) -> Structure:
        """Structure of a batch of the whole graph.  Raises as `sample_from`."""
        (roots,) = self.roots(spec, [unit])
        return sample_from(self._topology, spec.plan, unit, work, roots)

    def take_structure(self, job: BatchInProgress, spec: BatchSpec, structure: Structure) -> None:
        """What the batch's workspace holds now is its structure; rows have no addresses yet."""
        work, resolved = job.workspace, spec.plan.resolved
        num_nodes, num_edges = structure.num_nodes, structure.num_edges
        job.structure = structure
        job.structure_bytes = self.structure_bytes(structure, job.unit, spec)
        job.num_items = num_nodes
        if resolved.edge_features:  # edges have rows, as nodes do: they are numbered behind them
            job.num_items += num_edges
            work.items[:num_nodes] = work.n_id[:num_nodes]
            items = section(work.records[:num_edges], spec.record, "items")
            work.items[num_nodes : job.num_items] = items

    def structure_bytes(self, structure: Structure, unit: Unit, spec: BatchSpec) -> int:
        item, resolved = self._original.itemsize, spec.plan.resolved
        sizes = [item * structure.num_nodes, 8 * structure.num_seeds, 4 * structure.num_edges]
        sizes.append(4 * structure.num_ends)
        if resolved.has_trees:
            sizes += [4 * structure.num_nodes, 8 * structure.num_seeds]
        for frontier, edges in zip(structure.frontiers, structure.edges_per_hop, strict=True):
            sizes += [4 * frontier] * len(edges)
        sizes += [4 * getattr(spec.record, s) * structure.num_edges for s in _SENT]
        if isinstance(spec.plan, PartitionPlan):
            sizes.append(item * structure.num_nodes)
        if spec.owners is not None:
            sizes.append(spec.owners.owner.itemsize * structure.num_nodes)
        if unit.rank >= 0:
            sizes.append(RANK_BYTES * unit.num_seeds)
        return sum(align(size, ALIGN) for size in sizes)

    def fill(
        self, session: int, job: BatchInProgress, placement: Placement, spec: BatchSpec
    ) -> tuple[BatchReady | RowGroup, int]:
        """Copy what the group needs into its slots; returns its message and the rows copied."""
        work, num, copied = job.workspace, job.num_items, 0
        if placement.high > placement.low:
            copied = self._assembler.stage(
                work, placement.low, placement.high, placement.area, work.transit_slots
            )
        whole = placement.group == 0 and placement.last
        positions = None if whole else self._positions(job, placement)
        rows = self._assembler.group_arrays(work, num, positions)
        assert job.structure is not None
        arrays = structure_arrays(work, job.structure)
        return self.write(session, job, placement, spec, arrays, rows), copied

    def write(
        self,
        session: int,
        job: BatchInProgress,
        placement: Placement,
        spec: BatchSpec,
        arrays: StructureArrays,
        rows: Sequence[tuple[str, NDArray[Any] | Written]],
    ) -> BatchReady | RowGroup:
        """The message of a row group, what it tells of in its slots.

        arrays   of the batch's structure; they come with its first group
        rows     addresses of the group's rows, and their positions if these are not all
        """
        group = RowGroup(
            session=session,
            run=job.run,
            step=job.unit.step,
            group=placement.group,
            last=placement.last,
            num_rows=rows[0][1].size if rows else job.num_items,
            blob=write_blob(self._data, self._slot_bytes, placement.addresses, rows),
        )
        if placement.group > 0:
            return group
        assert job.structure is not None
        named = self._named_arrays(job.unit, job.structure, arrays, spec)
        return BatchReady(
            session=session,
            run=job.run,
            epoch=job.unit.epoch,
            step=job.unit.step,
            num_seeds=job.structure.num_seeds,
            nodes_per_hop=job.structure.nodes_per_hop,
            edges_per_hop=job.structure.edges_per_hop,
            structure=write_blob(self._data, self._slot_bytes, placement.structure, named),
            rows=group,
        )

    def _positions(self, job: BatchInProgress, placement: Placement) -> NDArray[np.uint32]:
        """Positions of the nodes of a group: its missing ones, and in group 0 all in place."""
        missing = job.workspace.order[placement.low : placement.high]
        if placement.group > 0:
            return missing
        in_place = self._assembler.in_place(job.workspace, job.num_items)
        return np.concatenate([in_place, missing])

    def _named_arrays(
        self, unit: Unit, structure: Structure, arrays: StructureArrays, spec: BatchSpec
    ) -> list[tuple[str, NDArray[Any] | Written]]:
        resolved = spec.plan.resolved

        def of_nodes(table: NDArray[Any]) -> Written:
            def take(nodes: NDArray[Any], out: NDArray[Any]) -> None:
                take_ids(table, nodes, nodes.size, out)

            return made(arrays.nodes, table.dtype, take)

        named: list[tuple[str, NDArray[Any] | Written]] = [
            ("n_id", of_nodes(self._original)),
            ("input_id", arrays.places),
        ]
        if isinstance(spec.plan, PartitionPlan):
            named.append(("store_id", joined(arrays.nodes)))
        if spec.owners is not None:
            named.append(("owner", of_nodes(spec.owners.owner)))
        if unit.rank >= 0:
            places = np.empty(unit.num_seeds, np.int64)
            seed_places(spec.plan, unit, places)
            named.append(("seed_rank", self._seed_ranks(spec, places)))
        used = 0
        for hop, edges in enumerate(structure.edges_per_hop):
            frontier = structure.frontiers[hop]
            for relation in range(len(edges)):
                counts = part(arrays.counts, used, used + frontier)
                named.append((f"counts:{hop}:{relation}", counts))
                used += frontier
        named.append(("src", arrays.local))
        for own, name in _SENT.items():
            if getattr(spec.record, own):
                named.append((name, written_section(arrays.edge_ids, spec.record, own)))
        if structure.num_ends:
            named.append(("ends", arrays.ends))
        if resolved.has_trees:
            named.append(("trees", arrays.trees))
        if resolved.temporal is not None:
            named.append(("times", arrays.times))
        return named
