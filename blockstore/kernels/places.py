"""Rows of packed epochs in arena slots: where they are follows from a number of each node."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.jit import leaf
from blockstore.kernels.rows import NO_ROW


class PlacedRows(NamedTuple):
    """The rows of one array that a batch of a group may want, by the places of its nodes."""

    hot: tuple[int, int]  # places of nodes whose rows stay: [first, stop)
    cold: tuple[int, int]  # and of those whose rows belong to the group
    hot_slots: NDArray[np.int64]  # of the blocks of the first
    cold_slots: NDArray[np.int64]  # and of the second
    rows_per_block: int
    row_bytes: int
    slot_bytes: int


@leaf
def address_places(places, rows, out):
    """Arena byte offset of each node's row; NO_ROW for a node that has none in this array.

    places   uint32 (nodes,)
    rows     PlacedRows
    out      uint64 (>= nodes,)
    """
    hot_first, hot_stop = rows.hot
    cold_first, cold_stop = rows.cold
    per_block, row_bytes = np.uint32(rows.rows_per_block), rows.row_bytes
    slot_bytes = rows.slot_bytes
    for i in range(places.size):
        place = np.int64(places[i])
        if hot_first <= place < hot_stop:
            row = np.uint32(place - hot_first)
            block = row // per_block
            slot = rows.hot_slots[block]
        elif cold_first <= place < cold_stop:
            row = np.uint32(place - cold_first)
            block = row // per_block
            slot = rows.cold_slots[block]
        else:
            out[i] = NO_ROW
            continue
        out[i] = np.uint64(slot * slot_bytes + np.int64(row - block * per_block) * row_bytes)
