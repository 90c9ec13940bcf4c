"""A session's batches: which may start, where each is placed, and how a worker builds it.

`SessionState` decides, without thread or I/O.  `Builder` samples and addresses in a worker thread,
then fills what was placed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from loaderd.sampling.rows import Addressed, RowAssembler
from loaderd.sampling.structure import HeldBlocks, Structure, StructureArrays, structure_arrays
from loaderd.sampling.topology import Topology

# sections of edge records that batches bring, and their names in a batch
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


class Placement(NamedTuple):
    """Slots for one row group of a batch."""

    group: int
    low: int  # missing nodes order[low:high] belong to it
    high: int
    last: bool
    structure: tuple[int, ...]  # slots; only group 0 has any
    addresses: tuple[int, ...]
    area: tuple[tuple[int, ...], ...]  # per row array
    sequence: int  # of delivery within the run

    def slots(self) -> list[int]:
        return [*self.structure, *self.addresses, *(s for slots in self.area for s in slots)]


@dataclass(slots=True, eq=False)
class BatchInProgress:
    """A batch from its start until it has been released."""

    run: int
    unit: Unit
    work: Workspace | None  # None: it waits for one, or has given it back
    structure: Structure | None = None
    addressed: Addressed | None = None
    structure_bytes: int = 0
    num_items: int = 0  # nodes, and edges if these have rows
    done: int = 0  # missing nodes that are placed
    groups: int = 0
    busy: bool = True  # a worker has it
    finished: bool = False  # its last group is filled: the workspace is free again
    leases: dict[int, list[int]] = field(default_factory=dict)  # group -> slots not yet released
    cancelled: bool = False

    @property
    def workspace(self) -> Workspace:
        """The workspace of a batch that a worker has."""
        assert self.work is not None
        return self.work


class RowSizes(NamedTuple):
    """What placement must know about the row arrays."""

    rows_per_slot: tuple[int, ...]
    slot_bytes: int

    def address_slots(self, num_rows: int, with_positions: bool) -> int:
        used = len(self.rows_per_slot) * align(8 * num_rows, ALIGN)
        return -(-(used + with_positions * align(4 * num_rows, ALIGN)) // self.slot_bytes)

    def area_slots(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // per) for n, per in zip(rows, self.rows_per_slot, strict=True))


class SessionState:
    """Credits, order and slots of one session.  The engine calls it under its lock."""

    def __init__(self, window: int, slots: list[int], sizes: RowSizes) -> None:
        """`slots`: the session's own share of the arena for structure, addresses and row areas."""
        self.window, self.sizes = window, sizes
        self.run = -1  # the first that goes on; earlier ones have ended
        self.failed = False  # nothing more is built before another run begins
        # by run and step, not wholly released
        self.jobs: dict[tuple[int, int], BatchInProgress] = {}
        self._free = list(slots)
        self.num_slots = len(slots)  # free and leased
        # started and not wholly placed, in step order
        self._order: deque[BatchInProgress] = deque()
        self._sequence = self._next_out = 0
        self._outbox: dict[int, BatchReady | RowGroup] = {}
        self._largest = 0  # slots of one group so far

    @property
    def depth(self) -> int:
        """Batches that can be leased at a time, as far as is known: by window, and by slots."""
        if self._largest == 0:
            return self.window
        return max(1, min(self.window, self.num_slots // self._largest))

    @property
    def waits(self) -> bool:
        """Whether nothing is being built, and nothing can be before leases come back."""
        if any(job.busy for job in self.jobs.values()):
            return False
        return bool(self._order) or len(self.jobs) >= self.window

    def widen(self, slots: list[int], batches: int) -> None:
        self._free += slots
        self.num_slots += len(slots)
        self.window += batches

    @property
    def idle(self) -> bool:
        return len(self._free) == self.num_slots

    def begin(self, run: int) -> list[BatchInProgress]:
        """End earlier runs, and take back what they hold; returns jobs that no worker has.

        The caller drops their pins and workspaces; those a worker has are marked cancelled.
        """
        ended = []
        for job in self.jobs.values():
            job.cancelled = True
            if not job.busy:
                self._forget(job)
                ended.append(job)
        self.jobs = {}
        self._order.clear()
        self._outbox.clear()
        self._sequence = self._next_out = 0
        self.run, self.failed = run, False
        return ended

    def may_start(self) -> bool:
        return not self.failed and len(self.jobs) < self.window

    def start(self, run: int, unit: Unit, work: Workspace) -> BatchInProgress:
        job = BatchInProgress(run, unit, work)
        self.jobs[job.run, unit.step] = job
        self._order.append(job)
        return job

    def admit(self, job: BatchInProgress) -> None:
        """Queue a batch that was sampled elsewhere, to be placed after those before it."""
        job.busy = False
        self.jobs[job.run, job.unit.step] = job
        self._order.append(job)

    def head(self) -> BatchInProgress | None:
        """The batch that is to be placed next, if it waits for that and the window is open."""
        job = self._order[0] if self._order else None
        if job is None or job.busy:
            return None
        return job if job.groups or len(self.jobs) - len(self._order) < self.window else None

    def place(self, job: BatchInProgress) -> Placement | None:
        """Slots for the job's next group, or None while it must wait for releases.

        All rows are one group if the free slots allow it.  Else it waits until all of the session's
        slots are free, and gets as many rows as these hold.
        """
        assert job.structure is not None
        assert job.addressed is not None
        first, missing = job.groups == 0, job.addressed.num_missing
        of_arrays, sizes = job.addressed.missing_rows, self.sizes
        structure = -(-job.structure_bytes // sizes.slot_bytes) if first else 0
        room = len(self._free) - structure
        if first:
            area = sizes.area_slots(of_arrays)
            addresses = sizes.address_slots(job.num_items, with_positions=False)
            if addresses + sum(area) <= room:
                return self._grant(job, structure, addresses, area, missing)
        if self.num_slots != len(self._free):
            return None
        present = job.num_items - missing if first else 0

        def need(count: int) -> tuple[int, tuple[int, ...]]:
            rows = tuple(min(count, m) for m in of_arrays)
            return sizes.address_slots(present + count, True), sizes.area_slots(rows)

        low, high = 0, missing - job.done  # the largest count that fits
        while low < high:
            middle = (low + high + 1) // 2
            addresses, area = need(middle)
            low, high = (middle, high) if addresses + sum(area) <= room else (low, middle - 1)
        addresses, area = need(low)
        assert addresses + sum(area) <= room, "the session's least holds one group"
        assert low or first, "the session's least holds one row of each array"
        return self._grant(job, structure, addresses, area, low)

    def _grant(
        self,
        job: BatchInProgress,
        structure: int,
        addresses: int,
        area: tuple[int, ...],
        count: int,
    ) -> Placement:
        assert job.addressed is not None

        def take(n: int) -> tuple[int, ...]:
            return tuple(self._free.pop() for _ in range(n))

        low = job.done
        job.done += count
        last = job.done == job.addressed.num_missing
        placement = Placement(
            job.groups, low, job.done, last, take(structure), take(addresses),
            tuple(take(n) for n in area), self._sequence,
        )  # fmt: skip
        self._sequence += 1
        job.leases[job.groups] = placement.slots()
        self._largest = max(self._largest, len(job.leases[job.groups]))
        job.groups += 1
        job.busy = True
        if last:
            self._order.popleft()
        return placement

    def filled(
        self, job: BatchInProgress, placement: Placement, message: BatchReady | RowGroup
    ) -> list[BatchReady | RowGroup]:
        """A group is ready; returns what may be sent now, in order."""
        job.busy = False
        job.finished = placement.last
        self._outbox[placement.sequence] = message
        out = []
        while self._next_out in self._outbox:
            out.append(self._outbox.pop(self._next_out))
            self._next_out += 1
        return out

    def release(self, run: int, step: int, group: int) -> BatchInProgress | None:
        """The client is done with a group; returns the job once it is wholly done."""
        job = self.jobs.get((run, step))
        if job is None or job.busy or group not in job.leases:
            return None
        self._free += job.leases.pop(group)
        if not job.finished or job.leases:
            return None
        del self.jobs[run, step]
        return job

    def abandon(self, job: BatchInProgress) -> None:
        """A worker is done with a cancelled job: its slots are free."""
        job.busy = False
        self._forget(job)

    def fail(self, job: BatchInProgress) -> None:
        """A worker could not build the job: nothing more is built before another run begins."""
        job.cancelled = True
        if self.jobs.get((job.run, job.unit.step)) is job:
            del self.jobs[job.run, job.unit.step]
        if job in self._order:
            self._order.remove(job)
        self.failed = True
        self.abandon(job)

    def _forget(self, job: BatchInProgress) -> None:
        for slots in job.leases.values():
            self._free += slots
        job.leases.clear()


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
    """The two steps of a batch; holds no state of its own."""

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
        """The roots that batches are sampled from.

        held   gives blocks of the graph, to look up edges; None: as workers hold them
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
        """The rank that trains each seed of a global batch, given the places of its seeds."""
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
        """Note the structure that a batch's workspace holds; its rows have no addresses yet."""
        work, resolved = job.workspace, spec.plan.resolved
        num_nodes, num_edges = structure.num_nodes, structure.num_edges
        job.structure = structure
        job.structure_bytes = self.structure_bytes(structure, job.unit, spec)
        job.num_items = num_nodes
        if resolved.edge_features:  # edges have rows, too: they are numbered after the nodes
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
        """Write a row group to its slots; returns its message.

        arrays   of the batch's structure, which comes with its first group
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
