"""The rows that batches want most, kept on a device: which they are, and who has which."""

import torch
from torch import Tensor


class Frequencies:
    """How often each node was wanted by the batches looked at."""

    def __init__(self, device: torch.device) -> None:
        self.num_batches = 0
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._counts = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, n_id: Tensor) -> None:
        """Count the nodes of a batch, int64 (nodes,) original ids, each once."""
        self.num_batches += 1
        ids = torch.cat((self._ids, n_id))
        counts = torch.cat((self._counts, torch.ones_like(n_id)))
        self._ids, inverse = torch.unique(ids, return_inverse=True)
        self._counts = torch.zeros_like(self._ids).index_add_(0, inverse, counts)

    def hottest(self, most: int) -> Tensor:
        """int64 (at most `most`,) ids wanted more than once, ascending; of equals the least ids."""
        order = torch.argsort(self._counts, descending=True, stable=True)[:most]
        return torch.sort(self._ids[order[self._counts[order] > 1]]).values


class HotRows:
    """Rows of some nodes on the device; each is taken from the first batch that brings it."""

    def __init__(self, ids: Tensor, row_bytes: int) -> None:
        """`ids`: int64 (rows,) original ids, ascending."""
        self._ids = ids
        self._rows = torch.empty((ids.numel(), row_bytes), dtype=torch.uint8, device=ids.device)
        self._there: Tensor | None = torch.zeros_like(ids, dtype=torch.bool)
        self.num_batches = 0  # learned from

    @property
    def num_rows(self) -> int:
        """Rows, those that are still to come included."""
        return self._ids.numel()

    @property
    def num_bytes(self) -> int:
        return self._rows.numel()

    @property
    def settled(self) -> bool:
        """Whether no more rows are taken."""
        return self._there is None

    def look_up(self, n_id: Tensor) -> tuple[Tensor, Tensor]:
        """Which nodes of a batch, int64 (nodes,), have their row here.  Waits for no device.

        Returns int64 (nodes,), the row of each or -1, and the rows, uint8 (cached, row_bytes).
        """
        if not self._ids.numel():
            return torch.full_like(n_id, -1), self._rows
        at = torch.searchsorted(self._ids, n_id).clamp_(max=self._ids.numel() - 1)
        here = self._ids[at] == n_id
        if self._there is not None:
            here &= self._there[at]
        return torch.where(here, at, -1), self._rows

    def learn(self, n_id: Tensor, rows: Tensor) -> float:
        """Take the rows that are wanted here and not there yet; the share that is there then.

        rows   uint8 (nodes, row_bytes)
        """
        self.num_batches += 1
        if self._there is None or not self._ids.numel():
            return 1.0
        at = torch.searchsorted(self._ids, n_id).clamp_(max=self._ids.numel() - 1)
        new = torch.nonzero((self._ids[at] == n_id) & ~self._there[at]).squeeze(1)
        self._rows[at[new]] = rows[new]
        self._there[at[new]] = True
        return float(self._there.float().mean())

    def settle(self) -> None:
        """Give up the rows that never came."""
        if self._there is not None:
            self._ids, self._rows = self._ids[self._there], self._rows[self._there]
            self._there = None
