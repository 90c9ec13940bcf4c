"""Tables in which sampling numbers the nodes of a batch."""

import numpy as np

from blockstore import concurrency
from blockstore.kernels.renumber import NodeTable


class RenumberingTables:
    """Tables that are used in turn.  Those that nobody has are clean."""

    def __init__(self) -> None:
        self._clean: concurrency.SimpleQueue[NodeTable] = concurrency.SimpleQueue()

    def add(self, table: NodeTable) -> None:
        """Add a table, whatever is in it."""
        reset_table(table)
        self.give(table)

    def take(self) -> NodeTable:
        """Take a table, as soon as nobody has it."""
        return self._clean.get()

    def give(self, table: NodeTable) -> None:
        """Give a clean table back."""
        self._clean.put(table)


def reset_table(table: NodeTable) -> None:
    """Make a table clean, whatever is in it."""
    if table.keys is None:
        table.values[:] = -1
    else:
        table.keys[:] = np.iinfo(table.keys.dtype).max
