"""Arrays laid one after the other over arena slots that need not be adjacent."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderd.api.protocol import Blob, BlobArray

ALIGN = 64


def write_blob(
    data: NDArray[np.uint8],
    slot_bytes: int,
    slots: Sequence[int],
    arrays: Sequence[tuple[str, NDArray[Any]]],
) -> Blob:
    """Copy contiguous arrays into the slots, in order.

    data    uint8 (arena bytes,)
    slots   enough for them, each array from a multiple of ALIGN bytes
    """
    placed, offset = [], 0
    for name, array in arrays:
        raw = array.view(np.uint8).reshape(-1)
        done = 0
        while done < raw.size:
            slot, within = divmod(offset + done, slot_bytes)
            count = min(raw.size - done, slot_bytes - within)
            start = slots[slot] * slot_bytes + within
            data[start : start + count] = raw[done : done + count]
            done += count
        placed.append(BlobArray(name, array.dtype.name, offset, array.size))
        offset += -(-raw.size // ALIGN) * ALIGN
    return Blob(tuple(slots), tuple(placed))
