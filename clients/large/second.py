"""Sampling again out of what a large batch has sampled: fewer draws of each node, keyed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockstore.kernels.random import make_key
from clients.hashing import SIGN, draw_hash, node_key

_KEPT = 6 << 60  # of keys, in place of a relation: no other draw has it


class SecondStage:
    """Keeps of each column that a step expands the draws with the smallest hashes.

    The hash of a draw is `draw_hash` under the key (seed, epoch, step, hop) of its target's
    original id and its slot, its place among the column's draws: independent of the first draws.
    """

    def __init__(self, fanouts: Sequence[int], seed: int, epoch: int, step: int) -> None:
        """`fanouts`: draws that are kept by each hop, at most; -1 is all."""
        self._fanouts = fanouts
        self._keys = [make_key(seed, epoch, step, hop, _KEPT) for hop in range(len(fanouts))]

    def __call__(self, hop: int, targets: Tensor, columns: Tensor, slots: Tensor) -> Tensor | None:
        """int64, which draws of a hop are kept, ascending; None: all.

        targets   int64 (draws,) original id of each draw's target
        columns   int64 (draws,) place of its column among those that the hop expands, ascending
        slots     int64 (draws,)
        """
        fanout = self._fanouts[hop]
        if fanout < 0:
            return None
        hashes = draw_hash(node_key(self._keys[hop], targets), slots)
        by_hash = torch.argsort(hashes ^ SIGN, stable=True)
        order = by_hash[torch.argsort(columns[by_hash], stable=True)]
        # columns stay where they are, so the ranks of a column's draws are its slots, permuted
        return torch.sort(order[slots < fanout]).values
