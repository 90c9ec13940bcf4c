"""Arrays of blobs in an arena, as views of it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderd.protocol import Blob, BlobArray


def views(
    arena: NDArray[np.uint8], slot_bytes: int, blob: Blob, array: BlobArray
) -> Iterator[tuple[int, NDArray[Any]]]:
    """An array of a blob as (first item, view of the arena) pieces, cut where its slots are apart.

    Items never straddle slots: offsets are multiples of 64, slots of 4096.
    """
    kind = np.dtype(array.dtype)
    begin, end = array.offset, array.offset + array.length * kind.itemsize
    at = begin
    while at < end:
        index, inside = divmod(at, slot_bytes)
        last = index
        while (last + 1) * slot_bytes < end and blob.slots[last + 1] == blob.slots[last] + 1:
            last += 1
        stop = min(end, (last + 1) * slot_bytes)
        address = blob.slots[index] * slot_bytes + inside
        yield (at - begin) // kind.itemsize, arena[address : address + stop - at].view(kind)
        at = stop
