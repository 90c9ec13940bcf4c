"""Models that travel around a ring of ranks, each as one flat tensor."""

from datetime import timedelta

import torch
from torch import Tensor, distributed

from clients.ranks import Ranks


class RankRing:
    """The ranks in their order, on a process group of their own: nothing else waits for it."""

    def __init__(self, ranks: Ranks) -> None:
        """All ranks make theirs at the same time."""
        self._ranks, self._group = ranks, None
        if ranks.world_size > 1:
            limit = timedelta(seconds=ranks.timeout_s)
            self._group = distributed.new_group(timeout=limit)

    def shift(self, values: Tensor, hops: int) -> None:
        """Put the values of the rank `hops` before this one in place of its own, 1-d.

        Both transfers are posted together, so that no two ranks wait for each other.
        """
        rank, world = self._ranks.rank, self._ranks.world_size
        if hops % world == 0:
            return
        arriving = torch.empty_like(values)
        posted = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, values, (rank + hops) % world, self._group),
                distributed.P2POp(distributed.irecv, arriving, (rank - hops) % world, self._group),
            ]
        )
        for transfer in posted:
            transfer.wait()
        values.copy_(arriving)
