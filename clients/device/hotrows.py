"""A cache on a device of the rows that batches use most."""

import torch
from torch import Tensor


class HotRows:
    """Rows of the nodes that batches use most, on a device.

    Nodes are counted until the hottest are chosen; then each row is copied from the first batch
    that has it, until `settle` is called.
    """

    def __init__(self, device: torch.device, row_bytes: int) -> None:
        self.num_counted = self.num_batches = 0  # batches passed to `count` and `learn`
        self.settled = False  # whether no more rows are added
        self._ids = torch.empty(0, dtype=torch.int64, device=device)  # ascending
        self._counts = torch.empty_like(self._ids)
        self._rows = torch.empty((0, row_bytes), dtype=torch.uint8, device=device)
        self._there = torch.empty(0, dtype=torch.bool, device=device)

    @property
    def num_rows(self) -> int:
        """Number of rows, including chosen ones that are not there yet."""
        return self._rows.size(0)

    @property
    def num_bytes(self) -> int:
        return self._rows.numel()

    def count(self, n_id: Tensor) -> None:
        """Count the nodes of a batch, int64 (nodes,) original ids, each once."""
        self.num_counted += 1
        ids = torch.cat((self._ids, n_id))
        counts = torch.cat((self._counts, torch.ones_like(n_id)))
        self._ids, inverse = torch.unique(ids, return_inverse=True)
        self._counts = torch.zeros_like(self._ids).index_add_(0, inverse, counts)

    def choose(self, num_bytes: int) -> None:
        """Choose the most used nodes, for rows of at most `num_bytes` in all; only nodes that were
        counted more than once, and among equals the smallest ids."""
        maximum = num_bytes // self._rows.size(1)
        order = torch.argsort(self._counts, descending=True, stable=True)[:maximum]
        self._ids = torch.sort(self._ids[order[self._counts[order] > 1]]).values
        self._rows = self._rows.new_empty(self._ids.numel(), self._rows.size(1))
        self._there = torch.zeros_like(self._ids, dtype=torch.bool)

    def look_up(self, n_id: Tensor) -> tuple[Tensor, Tensor]:
        """Find cached rows of a batch's nodes, int64 (nodes,).  Waits for no device.

        Returns int64 (nodes,), the row of each here or -1, and the rows, uint8 (cached, row_bytes).
        """
        if not self._ids.numel():
            return torch.full_like(n_id, -1), self._rows
        at = self._places(n_id)
        here = (self._ids[at] == n_id) & self._there[at]
        return torch.where(here, at, -1), self._rows

    def learn(self, n_id: Tensor, rows: Tensor) -> float:
        """Copy chosen rows that are not there yet; returns the share that is there afterwards.

        rows   uint8 (nodes, row_bytes)
        """
        self.num_batches += 1
        if self.settled or not self._ids.numel():
            return 1.0
        at = self._places(n_id)
        new = torch.nonzero((self._ids[at] == n_id) & ~self._there[at]).squeeze(1)
        self._rows[at[new]] = rows[new]
        self._there[at[new]] = True
        return float(self._there.float().mean())

    def settle(self) -> None:
        """Drop chosen rows that never came, and add no more."""
        self.settled = True
        self._ids, self._rows = self._ids[self._there], self._rows[self._there]
        self._there = self._there[self._there]

    def _places(self, n_id: Tensor) -> Tensor:
        """Row of each node, if it is chosen at all; at least one node must be chosen."""
        return torch.searchsorted(self._ids, n_id).clamp_(max=self._ids.numel() - 1)
