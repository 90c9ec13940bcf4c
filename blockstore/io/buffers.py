"""Page-aligned memory outside the arena."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def aligned_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """A zeroed uint8 array (num_bytes,) that starts on a page, as O_DIRECT requires."""
    size = max(mmap.PAGESIZE, num_bytes)
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)[:num_bytes]


def byte_view(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, for reads and writes; no copy."""
    held: Any = array  # numpy's stubs say Buffer only from Python 3.12 on
    return memoryview(held).cast("B") if array.size else memoryview(b"")
