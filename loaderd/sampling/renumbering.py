"""Store ids to local ids for one batch."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.renumber import clear_table, enter_seeds, renumber
from loaderd.memory.tables import reset_table
from loaderd.memory.workspace import Workspace, WorkspaceFull


class Renumbering:
    """Renumbers nodes by a table of the batch's workspace.  A context manager.

    If batches are trees, a node is a different one in each tree.
    """

    def __init__(self, work: Workspace, num_nodes: int) -> None:
        """`n_id[:num_nodes]`, and `trees` if any, hold the nodes found so far, in order."""
        self._work, self.num_nodes = work, num_nodes
        self._trees = work.trees if work.trees.size else None

    def __enter__(self) -> Self:
        self.table = self._work.tables.take()
        enter_seeds(self._work.n_id, self.num_nodes, self.table, self._trees)
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            clear_table(self._work.n_id, self.num_nodes, self.table, self._trees)
        else:
            reset_table(self.table)
        self._work.tables.give(self.table)

    def add(
        self,
        draws: NDArray[Any],
        starts: NDArray[np.int64],
        counts: NDArray[np.uint32],
        edge: int,
        trees: NDArray[np.uint32],
    ) -> int:
        """Write local ids of a frontier's draws to `local` from `edge` on; returns their end.

        trees   of the frontier's nodes, if batches are trees
        """
        work = self._work
        num_nodes, end = renumber(
            draws, starts, counts, self.table, work.n_id, self.num_nodes, work.local, edge,
            None if self._trees is None else trees, self._trees,
        )  # fmt: skip
        self.num_nodes = int(num_nodes if num_nodes >= 0 else ~num_nodes)
        if num_nodes < 0:
            raise WorkspaceFull
        return int(end)
