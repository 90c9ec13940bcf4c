"""Building one batch in a worker thread: sample and address, then fill what was placed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import align
from blockstore.io.arena import Arena
from loaderd.batch.rows import RowAssembler
from loaderd.batch.structure import HeldBlocks, Structure
from loaderd.batch.topology import Topology
from loaderd.engine.attachment import Attachment
from loaderd.engine.session import Job, Placement
from loaderd.errors import BatchFailed
from loaderd.hyper.single import expand
from loaderd.memory.blob import ALIGN, write_blob
from loaderd.memory.workspace import Workspace, WorkspaceFull
from loaderd.plans.base import Unit
from loaderd.plans.roots import Roots, edge_roots, node_roots, seed_places, timed_roots
from loaderd.protocol import BatchReady, RowGroup


class Builder:
    """The two steps of a batch.  Holds no state of its own."""

    def __init__(
        self,
        topology: Topology,
        assembler: RowAssembler,
        arena: Arena,
        original: NDArray[Any],
    ) -> None:
        """`original`: id_dtype (num_nodes,), store id -> id in the source."""
        self._topology, self._assembler = topology, assembler
        self._data, self._slot_bytes = arena.data, arena.slot_bytes
        self._original = original

    def roots(
        self, attachment: Attachment, units: Sequence[Unit], held: HeldBlocks | None = None
    ) -> list[Roots]:
        """Where batches begin.

        held   gives blocks of the graph, where edges are looked up; None: as workers hold them
        """
        plan, table, topology = attachment.plan, attachment.ends, self._topology
        if table is not None:
            relation, first_edge = table.relation, table.first_edge
            timed = plan.resolved.temporal is not None and not attachment.times.size
            return edge_roots(
                table, plan, units, attachment.times,
                lambda index: topology.find_edges(relation, first_edge, index, timed, held),
            )  # fmt: skip
        found = []
        for unit in units:
            index = np.empty(unit.num_seeds, np.int64)
            if attachment.macro is not None:
                attachment.macro.place_seeds(unit, index)
            else:
                seed_places(plan, unit, index)
            if plan.resolved.temporal is None:
                found.append(node_roots(attachment.seeds, index))
            else:
                seeds, times = attachment.seeds, attachment.times
                found.append(timed_roots(plan, unit, seeds, times, index))
        return found

    def structure(self, attachment: Attachment, unit: Unit, work: Workspace) -> Structure:
        """Seeds and structure of a batch, into a workspace.

        Raises WorkspaceFull: it is a small one, the batch a large one; BatchFailed.
        """
        (roots,) = self.roots(attachment, [unit])
        macro = attachment.macro
        sampled_from = self._topology if macro is None else macro.graph(unit)
        try:
            return sampled_from.sample(attachment.plan, unit, work, roots)
        except WorkspaceFull:
            if work.small:
                raise
            raise BatchFailed(
                "a batch finds more edges than there are: with fanout -1 make the seeds distinct"
            ) from None

    def sample(self, job: Job, attachment: Attachment) -> None:
        """Seeds, structure, and the addresses of the rows that are or come in place."""
        assert job.work is not None
        structure = self.structure(attachment, job.unit, job.work)
        self._complete(job, structure, attachment)

    def adopt(self, job: Job, attachment: Attachment) -> None:
        """A batch that was sampled before, as if its workspace had just been filled."""
        sampled, work = job.sampled, job.work
        assert sampled is not None
        assert work is not None
        expand(sampled, work)
        if job.cached:
            num = sampled.structure.num_nodes
            assert not attachment.edge_rows
            for a, addresses in enumerate(work.addresses):
                attachment.cached_rows.address(work.n_id, num, a, addresses)
            self._take_original(work, num)
        else:
            self._complete(job, sampled.structure, attachment)

    def _complete(self, job: Job, structure: Structure, attachment: Attachment) -> None:
        work = job.work
        assert work is not None
        job.structure = structure
        job.structure_bytes = self.structure_bytes(structure, job.unit, attachment)
        self._take_original(work, structure.num_nodes)
        job.num_items = structure.num_nodes
        if attachment.edge_rows:
            job.num_items += structure.num_edges
            work.items[: structure.num_nodes] = work.n_id[: structure.num_nodes]
            work.items[structure.num_nodes : job.num_items] = work.edge_ids[: structure.num_edges]
        if attachment.macro is not None:
            graph = attachment.macro.graph(job.unit)
            for a, addresses in enumerate(work.addresses):
                graph.address(work.n_id, structure.num_nodes, a, addresses)
            job.addressed = attachment.nothing_missing()
            return
        self._assembler.tick()
        job.addressed = self._assembler.address(work, job.num_items, 2 * attachment.window)

    def _take_original(self, work: Workspace, num: int) -> None:
        np.take(self._original, work.n_id[:num], out=work.original[:num], mode="clip")

    def structure_bytes(self, structure: Structure, unit: Unit, attachment: Attachment) -> int:
        """Bytes of the blob of a batch's structure."""
        item = self._original.itemsize
        sizes = [item * structure.num_nodes, 8 * unit.num_seeds, 4 * structure.num_edges]
        sizes.append(4 * structure.num_ends)
        if attachment.plan.resolved.temporal is not None:
            sizes += [4 * structure.num_nodes, 8 * unit.num_seeds]
        for frontier, edges in zip(structure.frontiers, structure.edges_per_hop, strict=True):
            sizes += [4 * frontier] * len(edges)
        if attachment.plan.resolved.edge_ids:
            sizes.append(attachment.edge_id_bytes * structure.num_edges)
        return sum(align(size, ALIGN) for size in sizes)

    def fill(
        self, session: int, job: Job, placement: Placement, attachment: Attachment
    ) -> tuple[BatchReady | RowGroup, int]:
        """Copy what the group needs into its slots; returns its message and the rows copied."""
        assert job.structure is not None
        assert job.addressed is not None
        assert job.work is not None
        work, num = job.work, job.num_items
        copied = 0
        if placement.high > placement.low:
            copied = self._assembler.stage(
                work, placement.low, placement.high, placement.area, attachment.transit(work)
            )
        whole = placement.group == 0 and placement.last
        positions = None if whole else self._positions(job, placement)
        arrays = self._assembler.group_arrays(work, num, positions)
        rows = RowGroup(
            session=session,
            run=job.run,
            step=job.unit.step,
            group=placement.group,
            last=placement.last,
            num_rows=num if positions is None else positions.size,
            blob=write_blob(self._data, self._slot_bytes, placement.addresses, arrays),
        )
        if placement.group > 0:
            return rows, copied
        return self._ready(session, job, placement, attachment, rows), copied

    def _ready(
        self,
        session: int,
        job: Job,
        placement: Placement,
        attachment: Attachment,
        rows: RowGroup,
    ) -> BatchReady:
        assert job.structure is not None
        arrays = self._structure_arrays(job, attachment)
        return BatchReady(
            session=session,
            run=job.run,
            epoch=job.unit.epoch,
            step=job.unit.step,
            num_seeds=job.unit.num_seeds,
            nodes_per_hop=job.structure.nodes_per_hop,
            edges_per_hop=job.structure.edges_per_hop,
            structure=write_blob(self._data, self._slot_bytes, placement.structure, arrays),
            rows=rows,
        )

    def _positions(self, job: Job, placement: Placement) -> NDArray[np.uint32]:
        """Positions of the nodes of a group: its missing ones, and in group 0 all in place."""
        assert job.structure is not None
        assert job.work is not None
        missing = job.work.order[placement.low : placement.high]
        if placement.group > 0:
            return missing
        in_place = self._assembler.in_place(job.work, job.num_items)
        return np.concatenate([in_place, missing])

    def _structure_arrays(self, job: Job, attachment: Attachment) -> list[tuple[str, NDArray[Any]]]:
        assert job.structure is not None
        assert job.work is not None
        structure, work = job.structure, job.work
        arrays: list[tuple[str, NDArray[Any]]] = [
            ("n_id", work.original[: structure.num_nodes]),
            ("input_id", work.index[: job.unit.num_seeds]),
        ]
        used = 0
        for hop, edges in enumerate(structure.edges_per_hop):
            frontier = structure.frontiers[hop]
            for relation in range(len(edges)):
                arrays.append((f"counts:{hop}:{relation}", work.counts[used : used + frontier]))
                used += frontier
        arrays.append(("src", work.local[: structure.num_edges]))
        if attachment.plan.resolved.edge_ids:
            arrays.append(("e_id", work.edge_ids[: structure.num_edges]))
        if structure.num_ends:
            arrays.append(("ends", work.ends[: structure.num_ends]))
        if attachment.plan.resolved.temporal is not None:
            arrays.append(("trees", work.trees[: structure.num_nodes]))
            arrays.append(("times", work.times[: job.unit.num_seeds]))
        return arrays
