"""Tables with an entry for every node of a store, which its sessions share.

A thread has a table while it numbers the nodes of a batch, and waits for nothing but blocks of the
graph meanwhile.  So such a table need not belong to a workspace: as many as there are workers serve
all sessions.
"""

from collections.abc import Hashable

import numpy as np

from blockstore import concurrency
from blockstore.io.arena import Arena
from blockstore.kernels.renumber import NodeTable
from loaderd.api.errors import Refused
from loaderd.memory.slots import SHORT_WAIT_S, SlotBroker
from loaderd.memory.tables import RenumberingTables


def table_slots(num_nodes: int, slot_bytes: int) -> int:
    """Adjacent arena slots that a table takes."""
    return -(-4 * num_nodes // slot_bytes)


class SharedTables:
    """Tables with an entry for every node, which sessions share.  Any thread may call.

    They take memory as sessions join, and give it back when the last one leaves.  Until then an
    equal part is charged to each.
    """

    def __init__(self, broker: SlotBroker, arena: Arena, num_nodes: int, workers: int) -> None:
        self._broker, self._arena, self._num_nodes, self._maximum = (
            broker,
            arena,
            num_nodes,
            workers,
        )
        self._each = table_slots(num_nodes, arena.slot_bytes)
        self._lock = concurrency.Lock()
        self._members = dict[Hashable, int]()  # workspaces of each session
        self._tables, self._slots = RenumberingTables(), list[int]()

    def share(self, sessions: int) -> int:
        """Slots that are charged to each of so many sessions, once there are all tables."""
        return -(-self._maximum * self._each // sessions)

    def slots_to_come(self) -> int:
        """Slots that are taken yet if more sessions join."""
        with self._lock:
            return self._maximum * self._each - len(self._slots)

    def num_slots(self, member: Hashable) -> int:
        """Slots that are charged to a session: its part, rounded up; 0: it has not joined."""
        with self._lock:
            return -(-len(self._slots) // len(self._members)) if member in self._members else 0

    def join(self, member: Hashable, workspaces: int) -> RenumberingTables:
        """The tables for so many more workspaces of a session.  Sessions join one at a time.

        Raises Refused: there is no room for a single table.
        """
        with self._lock:  # a member from now on: the tables stay if the last other one leaves
            self._members[member] = self._members.get(member, 0) + workspaces
            wanted = min(self._maximum, sum(self._members.values()))
            missing = wanted - len(self._slots) // self._each
        try:
            for _ in range(missing):
                self._add_table()
        except Refused:  # with fewer tables, workers wait for one another
            if not self._slots:
                self.leave(member)
                raise
        return self._tables

    def _add_table(self) -> None:
        first = self._broker.take_run(self._each, SHORT_WAIT_S)
        start = first * self._arena.slot_bytes
        values = self._arena.data[start : start + 4 * self._num_nodes].view(np.int32)
        self._tables.add(NodeTable(None, values))
        with self._lock:
            self._slots += range(first, first + self._each)

    def leave(self, member: Hashable) -> None:
        """A session numbers no more nodes."""
        with self._lock:
            if self._members.pop(member, None) is None or self._members:
                return
            slots, self._slots, self._tables = self._slots, [], RenumberingTables()
        self._broker.give(slots)
