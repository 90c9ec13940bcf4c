"""Store ids to local ids for one batch."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.renumber import clear_table, enter_seeds, renumber
from loaderd.memory.workspace import Workspace, WorkspaceFull


class Renumbering:
    """By the table of the batch's workspace.  A context manager.

    Where batches are trees, a node is another one in each of them.
    """

    def __init__(self, work: Workspace, num_nodes: int) -> None:
        """`n_id[:num_nodes]` is in use: nodes found so far, in order; so are `trees`, if any."""
        self._work, self.num_nodes = work, num_nodes
        self._trees = work.trees if work.trees.size else None

    def __enter__(self) -> Self:
        enter_seeds(self._work.n_id, self.num_nodes, self._work.table, self._trees)
        return self

    def __exit__(self, *_error: object) -> None:
        clear_table(self._work.n_id, self.num_nodes, self._work.table, self._trees)

    def add(
        self,
        draws: NDArray[Any],
        starts: NDArray[np.int64],
        counts: NDArray[np.uint32],
        edge: int,
        trees: NDArray[np.uint32],
    ) -> int:
        """Local ids of a frontier's draws, into `local` from `edge` on; returns the last's end.

        trees   of the frontier's nodes, where batches are trees
        """
        work = self._work
        num_nodes, end = renumber(
            draws, starts, counts, work.table, work.n_id, self.num_nodes, work.local, edge,
            None if self._trees is None else trees, self._trees,
        )  # fmt: skip
        self.num_nodes = int(num_nodes if num_nodes >= 0 else ~num_nodes)
        if num_nodes < 0:
            raise WorkspaceFull
        return int(end)
