"""Areas that hold the compact structures of sampled batches."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from blockstore import concurrency
from loaderd.plans.base import Unit
from loaderd.sampling.structure import Structure, StructureArrays

ALIGN = 64


def aligned_bytes(arrays: Iterable[NDArray[Any]]) -> int:
    """Bytes of an area that arrays take."""
    return sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)


class AreaFull(Exception):
    """An area has no more room."""


class StructureArea:
    """Arrays one after the other in a piece of memory, all freed at once."""

    def __init__(self, memory: NDArray[np.uint8], used: int = 0) -> None:
        """`used`: bytes at the beginning that are taken."""
        self._memory, self._used = memory, used
        self._lock = concurrency.Lock()
        self.left = 0  # batches whose structure is still needed

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def take(self, dtype: DTypeLike, count: int) -> NDArray[Any]:
        """Room for `count` items.  Any thread may call.  Raises AreaFull."""
        first = self.reserve(dtype, count)
        return self.view(dtype)[first : first + count]

    def reserve(self, dtype: DTypeLike, count: int) -> int:
        """Room for `count` items, as the place of the first in `view(dtype)`.  Raises AreaFull."""
        item = np.dtype(dtype).itemsize
        spare = 0 if ALIGN % item == 0 else item  # such items lie at multiples of their own size
        size = -(-(count * item + spare) // ALIGN) * ALIGN
        with self._lock:
            start = self._used
            if start + size > self._memory.size:
                raise AreaFull
            self._used = start + size
        return -(-start // item)

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        return self._memory.view(np.dtype(dtype))

    def copy(self, values: NDArray[Any]) -> NDArray[Any]:
        """A copy of an array.  Raises AreaFull."""
        out = self.take(values.dtype, values.size)
        out[:] = values
        return out

    def rewind(self) -> None:
        """Free all arrays, but keep `left`."""
        self._used = 0

    def reset(self) -> None:
        self._used = self.left = 0


class Sampled(NamedTuple):
    """The compact structure of a sampled batch."""

    batch: int  # its number since the session has begun, see `Hyper.begin`
    unit: Unit
    structure: Structure
    arrays: StructureArrays
    area: StructureArea
    run: int = -1
    edges: tuple[NDArray[Any], ...] = ()  # id_dtype: items of the edges, if these have rows
    num_bytes: int = 0  # of the area that it takes

    @property
    def items(self) -> tuple[NDArray[Any], ...]:
        """Items that have rows: the nodes, then the edges, in consecutive pieces."""
        return self.arrays.nodes + self.edges
