"""Tables of all nodes, which sessions of a store share.

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


class SharedTables:
    """Tables of all nodes of a store, which its sessions share.  Any thread may call.

    They take memory when the first session joins, and give it back when the last one leaves.  Until
    then an equal part is charged to each.
    """

    def __init__(self, broker: SlotBroker, arena: Arena, num_nodes: int, workers: int) -> None:
        self._broker, self._arena, self._num_nodes = broker, arena, num_nodes
        self.maximum, self.each = workers, -(-4 * num_nodes // arena.slot_bytes)  # tables, slots
        self._lock = concurrency.Lock()
        self._members = dict[Hashable, int]()  # workspaces of each session
        self._tables, self._slots = RenumberingTables(), list[int]()

    def slots_for(self, sessions: int) -> int:
        """The part of each of so many sessions, in slots."""
        return -(-self.maximum * self.each // sessions)

    def slots_to_come(self) -> int:
        """Slots that sessions that join may take for tables, in all."""
        with self._lock:
            return self.maximum * self.each - len(self._slots)

    def num_slots(self, member: Hashable) -> int:
        """Slots that are charged to a session: its part, rounded up; 0: it has not joined."""
        with self._lock:
            return -(-len(self._slots) // len(self._members)) if member in self._members else 0

    def join(self, member: Hashable, workspaces: int) -> RenumberingTables:
        """The tables for so many more workspaces of a session.  Sessions join one at a time.

        Raises Refused: there is no room for a table.
        """
        with self._lock:
            wanted = min(self.maximum, sum(self._members.values()) + workspaces)
            missing = wanted - len(self._slots) // self.each
        for left in range(missing, 0, -1):
            try:
                first = self._broker.take_run(self.each, SHORT_WAIT_S)
            except Refused:
                if left == wanted:
                    raise
                break  # with fewer tables, workers wait for one another
            start = first * self._arena.slot_bytes
            values = self._arena.data[start : start + 4 * self._num_nodes].view(np.int32)
            with self._lock:
                self._slots += range(first, first + self.each)
            self._tables.add(NodeTable(None, values))
        with self._lock:
            self._members[member] = self._members.get(member, 0) + workspaces
            return self._tables

    def leave(self, member: Hashable) -> None:
        """A session numbers no more nodes."""
        with self._lock:
            if self._members.pop(member, None) is None or self._members:
                return
            slots, self._slots, self._tables = self._slots, [], RenumberingTables()
        self._broker.give(slots)
