"""Readers of several steps at once, which gather rows that steps share only once."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.kernels.renumber import NodeTable, enter_seeds, renumber
from clients.batch import BatchReader, ItemOrder
from clients.connection.buffers import BufferPool, Memory
from clients.connection.session import Session
from clients.cut import BatchCutter
from clients.torch import Batch, only_type
from loaderd.api.protocol import BatchReady

_FIRST_ROOM = 1 << 12  # nodes


class DistinctNodes:
    """Numbers nodes in order of first occurrence, over several batches."""

    def __init__(self) -> None:
        self.num = 0
        self._make_room(_FIRST_ROOM)

    def add(self, n_id: NDArray[Any]) -> NDArray[np.int64]:
        """The number of each node; new nodes get the next numbers."""
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


class NewRowsReader(BatchReader):
    """Reads batches with only the rows of nodes that no earlier batch since `begin` had.

    The daemon serves them like any others, and each is released before the next: its memory does
    not depend on the number of steps read at once.
    """

    def begin(self) -> None:
        self._distinct = DistinctNodes()
        self.places: list[Tensor] = []  # int64, by batch: of its nodes among the distinct ones

    def _wanted(self, ready: BatchReady, nodes: ItemOrder) -> ItemOrder:
        """The new nodes as the only type; all others have no type."""
        known = self._distinct.num
        (n_id,) = (array for array in ready.structure.arrays if array.name == "n_id")
        places = self._distinct.add(self._narrow(ready.structure, n_id))
        self.places.append(torch.from_numpy(places))
        maximum = np.maximum.accumulate(np.concatenate([[known - 1], places]))
        new = places > maximum[:-1]
        order = np.flatnonzero(new)
        if order.size == places.size:
            return nodes
        return ItemOrder([0, order.size], ~new, order, places - known, some=True)


class PartReader(BatchReader):
    """Reads one rank's part of batches that were sampled for all ranks: that of some seeds.

    The structure of the part is cut out of the whole, and only its rows are gathered.
    """

    def __init__(self, session: Session, pool: Memory, threads: int) -> None:
        super().__init__(session, BufferPool(), threads)  # for the whole structure
        self._target = pool

    def read_part(self, step: int, seeds: NDArray[np.int64]) -> Batch:
        """Read a part of a batch, all of it copied and released; waits for the daemon.

        seeds   of the part, as places among the batch's seeds
        """
        ready = self._session.receive(BatchReady, step)
        self._target.received(self._session.attachment.data, [])
        named = {array.name: array for array in ready.structure.arrays}
        num_nodes = sum(ready.nodes_per_hop)
        structure = self._structure(ready, named, ItemOrder([0, num_nodes]), {})
        cutter = BatchCutter(Batch(x=None, y=None, **only_type(structure)))
        cut = cutter.structure(torch.from_numpy(seeds))
        nodes = cut.nodes.numpy()
        other, place = np.ones(num_nodes, np.bool_), np.empty(num_nodes, np.int64)
        other[nodes], place[nodes] = False, np.arange(nodes.size)
        rows = self._rooms(self._target, [nodes.size] * len(self._session.attached.rows))
        self._gather_groups(ready, ItemOrder([0, nodes.size], other, nodes, place, some=True), rows)
        part = cutter.with_rows(cut, torch.from_numpy(seeds))
        return replace(part, **only_type(self._row_fields(rows)))
