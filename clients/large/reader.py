"""Readers of several steps at once: rows that steps have in common are gathered once."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockstore.kernels.renumber import NodeTable, enter_seeds, renumber
from clients.batch import BatchArrays, BatchReader, ItemOrder, Named, numpy_dtype
from clients.connection.buffers import BufferPool, Memory
from clients.connection.session import Session
from clients.cut import BatchCutter
from clients.large.steps import EpochSteps
from clients.torch import Batch
from loaderd.api.protocol import BatchReady

_FIRST_ROOM = 1 << 12  # nodes


class DistinctNodes:
    """Numbers nodes in order of first occurrence, over several batches."""

    def __init__(self) -> None:
        self.num = 0
        self._make_room(_FIRST_ROOM)

    def add(self, n_id: NDArray[Any]) -> NDArray[np.int64]:
        """The number of each of these nodes; new ones get the next."""
        draws = n_id.astype(np.uint64)
        if self.num + draws.size > self._nodes.size:
            known = self._nodes[: self.num]
            self._make_room(2 * (self.num + draws.size))
            self._nodes[: self.num] = known
            enter_seeds(self._nodes, self.num, self._table, None)
        places = np.empty(draws.size, np.uint32)
        starts, counts = np.zeros(1, np.int64), np.array([draws.size], np.uint32)
        num, _ = renumber(
            draws, starts, counts, self._table, self._nodes, self.num, places, 0, None, None
        )
        self.num = int(num)
        return places.astype(np.int64)

    def _make_room(self, num_nodes: int) -> None:
        slots = 1 << (2 * num_nodes - 1).bit_length()
        self._nodes = np.empty(num_nodes, np.uint64)
        self._table = NodeTable(
            np.full(slots, -1, np.int64).view(np.uint64), np.empty(slots, np.uint32)
        )


class OwnArrays(NamedTuple):
    """Batches of consecutive steps."""

    steps: list[BatchArrays]  # with rows of the nodes that no earlier one has
    places: list[NDArray[np.int64]]  # of their nodes among the distinct ones


class SharedArrays(NamedTuple):
    """A batch that was sampled as a whole, and the steps that are taken out of it."""

    whole: BatchArrays
    steps: range
    cuts: list[tuple[int, int]]  # of each step: [start, stop) among the seeds of `whole`


class OwnReader:
    """Reads the steps of a large batch one after the other; each row comes once.

    The daemon serves them as it serves any trainer, and has each batch back before the next: its
    memory does not depend on how many steps are read at once.
    """

    steps: EpochSteps  # of the epoch that is read

    def __init__(self, session: Session, pool: Memory, threads: int) -> None:
        self._reader = _NewRowsReader(session, pool, threads)

    def read(self, step: int) -> OwnArrays:
        """The batches of a step and of all that follow it in its large batch."""
        self._reader.begin()
        batches = [self._reader.read(s) for s in self.steps.of(step)]
        return OwnArrays(batches, self._reader.places)

    def close(self) -> None:
        self._reader.close()


class _NewRowsReader(BatchReader):
    """Reads batches with the rows of nodes that no batch had since `begin`."""

    def begin(self) -> None:
        self._distinct = DistinctNodes()
        self.places: list[NDArray[np.int64]] = []  # of each batch since

    def _wanted(self, ready: BatchReady, named: Named, nodes: ItemOrder) -> ItemOrder:
        """New nodes as the only type there is; others are of no type."""
        known = self._distinct.num
        places = self._distinct.add(self._narrow(ready.structure, named["n_id"]))
        self.places.append(places)
        most = np.maximum.accumulate(np.concatenate([[known - 1], places]))
        new = places > most[:-1]
        order = np.flatnonzero(new)
        if order.size == places.size:
            return nodes
        return ItemOrder([0, order.size], ~new, order, places - known, some=True)


class SharedReader:
    """Reads large batches that the daemon samples as such.

    If one is for all ranks of a job each takes its shares of the steps: their structure is cut out,
    and only their rows are gathered.
    """

    steps: EpochSteps  # of the epoch that is read

    def __init__(
        self, session: Session, pool: Memory, threads: int, rank: int, common: bool
    ) -> None:
        """`common`: whether each is for all ranks."""
        self._rank = rank
        self._reader = (_PartReader if common else BatchReader)(session, pool, threads)

    def read(self, step: int) -> SharedArrays:
        """The large batch of a step, with this step and those that follow in it."""
        steps = self.steps.of(step)
        shares = [self.steps.seeds(s, self._rank) for s in steps]
        if isinstance(self._reader, _PartReader):
            self._reader.take(np.concatenate([np.arange(s.start, s.stop) for s in shares]))
            ends = [0, *accumulate(len(s) for s in shares)]
            shares = [range(*ends) for ends in pairwise(ends)]
        whole = self._reader.read(self.steps.large(step))
        return SharedArrays(whole, steps, [(s.start, s.stop) for s in shares])

    def close(self) -> None:
        self._reader.close()


class _PartReader(BatchReader):
    """Reads of each batch what some of its seeds would have alone."""

    def __init__(self, session: Session, pool: Memory, threads: int) -> None:
        super().__init__(session, BufferPool(), threads)  # for the structure as a whole
        self._target = pool

    def take(self, seeds: NDArray[np.int64]) -> None:
        """Which seeds of the next batch are meant, by their places."""
        self._seeds = torch.from_numpy(seeds)

    def read(self, step: int) -> BatchArrays:
        """The part of a batch, all of it copied and released; waits for the daemon."""
        self._load_kernels()
        ready, attached = self._session.receive(BatchReady, step), self._session.attached
        self._target.received(self._session.attachment.data, [])
        named = {array.name: array for array in ready.structure.arrays}
        num_nodes = sum(ready.nodes_per_hop)
        whole = self._structure(ready, named, ItemOrder([0, num_nodes]), {}, {})
        batch = Batch(
            x=None,
            y=None,
            edge_index=torch.from_numpy(whole.edges).view(2, -1),
            n_id=torch.from_numpy(whole.n_id),
            e_id=None,
            input_id=torch.from_numpy(whole.input_id),
            batch_size=whole.num_seeds,
            num_sampled_nodes=whole.nodes_per_hop[0],
            num_sampled_edges=whole.edges_per_hop[0],
            epoch=whole.epoch,
            step=step,
            frontier=attached.resolved.frontier,
        )
        cut = BatchCutter(batch).structure(self._seeds)
        nodes, edges = cut.nodes.numpy(), cut.edges.numpy()
        other, place = np.ones(num_nodes, np.bool_), np.empty(num_nodes, np.int64)
        other[nodes], place[nodes] = False, np.arange(nodes.size)
        rows = {
            spec.name: self._target.rows(spec, (nodes.size, *spec.row_shape), numpy_dtype(spec))
            for spec in attached.rows
        }
        self._gather_groups(ready, ItemOrder([0, nodes.size], other, nodes, place, some=True), rows)
        return replace(
            whole,
            num_seeds=self._seeds.numel(),
            n_id=whole.n_id[nodes],
            node_starts=[0, nodes.size],
            input_id=whole.input_id[self._seeds],
            edges=cut.edge_index.numpy().reshape(-1),
            edge_starts=[0, edges.size],
            e_id=None if whole.e_id is None else whole.e_id[edges],
            edge_weight=None if whole.edge_weight is None else whole.edge_weight[edges],
            edge_time=None if whole.edge_time is None else whole.edge_time[edges],
            nodes_per_hop=[cut.num_sampled_nodes],
            edges_per_hop=[cut.num_sampled_edges],
            rows=rows,
        )
