"""Plan `hyperbatch`: the batches of `minibatch`, built many at a time, block by block (AGNES)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderd.plans.minibatch import MinibatchPlan


class HyperbatchPlan(MinibatchPlan):
    """Semantically `minibatch`: how many batches are built together changes no bit."""

    name = "hyperbatch"


def block_schedule(
    needed: NDArray[np.uint8], present: NDArray[np.bool_], upward: bool, share: int
) -> list[NDArray[np.int64]]:
    """In which groups the blocks that a hop of all minibatches needs are held, each block once.

    needed    uint8 (num_blocks,)   not 0: at least one minibatch needs the block
    present   bool (num_blocks,)    in memory: these come first
    upward    direction of the others; hops alternate, so that what was read last is used first
    share     blocks of a group, at most

    Blocks of a group ascend.  A block that is not in memory is read once for all minibatches.
    """
    wanted = needed.astype(bool)
    groups: list[NDArray[np.int64]] = []
    for part in (np.flatnonzero(wanted & present), np.flatnonzero(wanted & ~present)):
        cut = [part[i : i + share] for i in range(0, part.size, share)]
        groups += cut if upward else cut[::-1]
    return groups


def grown(rows: list[int], batches: int) -> int:
    """Different rows of `batches` minibatches, from those of 1, 2, 4, ... that were counted.

    rows   different rows of the first 1, 2, 4, ... minibatches; the curve goes on as a power
    """
    known = 1 << (len(rows) - 1)
    if batches <= known:
        return int(np.interp(batches, [1 << i for i in range(len(rows))], rows))
    if len(rows) == 1:
        return rows[0] * batches
    power: Any = np.log2(max(1.0, rows[-1] / max(1, rows[-2])))
    return int(rows[-1] * (batches / known) ** min(1.0, float(power)))


def choose_size(rows: list[int], row_bytes: int, batch_bytes: int, room: int, most: int) -> int:
    """Minibatches of a hyperbatch: as many as have room with all their different rows.

    rows          as `grown` takes them
    batch_bytes   of a minibatch's structure, times the areas for it, and of what its building takes
    room          bytes for rows and structure
    """
    size = 1
    while size < most and (size + 1) * batch_bytes + grown(rows, size + 1) * row_bytes <= room:
        size += 1
    return size
