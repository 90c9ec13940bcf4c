"""Host memory in which one batch at a time is laid out, so that few copies bring it to a device."""

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

ALIGN = 64  # bytes, of each array
FIRST_BYTES = 1 << 20
NO_RESERVE = 0x4000  # MAP_NORESERVE: address space only


class SlabPlace(NamedTuple):
    """Where an array lies in a slab."""

    part: int  # or shadow
    offset: int  # bytes


class Slab:
    """Memory for one batch; it grows to what a batch needs, and is then used again and again.

    It has parts, each of which is copied at once: one, unless a batch outgrew what was there.
    Arrays of `shadow` have an address and no memory: they stand for what only a device will hold.
    """

    def __init__(self, allocate: Callable[[int], Tensor], first: int = FIRST_BYTES) -> None:
        """`allocate`: uint8 memory of so many bytes; `first`: what to begin with, at least."""
        self._allocate, self._first = allocate, first
        self._parts: list[Tensor] = []
        self._used: list[int] = []
        self._shadows: list[NDArray[np.uint8]] = []
        self._shadowed: list[int] = []  # bytes of each

    def clear(self) -> None:
        """Forget the arrays: what held them is no longer read."""
        if len(self._parts) > 1:  # an eighth of slack: batches of a plan differ a little in size
            size = sum(self._used) * 9 // 8
            self._parts = []
            self._parts = [self._allocate(size)]
        self._used = [0] * len(self._parts)
        self._shadowed = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        first = -(-self._used[-1] // ALIGN) * ALIGN if self._used else 0
        if not self._parts or first + num_bytes > self._parts[-1].numel():
            size = 2 * self._parts[-1].numel() if self._parts else self._first
            self._parts.append(self._allocate(max(size, num_bytes)))
            self._used.append(0)
            first = 0
        self._used[-1] = first + num_bytes
        raw: NDArray[Any] = self._parts[-1].numpy()[first : first + num_bytes]
        return raw.view(kind).reshape(shape)

    def shadow(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array that must be neither read nor written; shadows are numbered as they come."""
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        number = len(self._shadowed)
        if number == len(self._shadows):
            self._shadows.append(np.empty(0, np.uint8))
        if self._shadows[number].size < num_bytes or not num_bytes:
            size = max(mmap.PAGESIZE, num_bytes * 5 // 4)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            self._shadows[number] = np.frombuffer(mmap.mmap(-1, size, flags), np.uint8)
        self._shadowed.append(num_bytes)
        return self._shadows[number][:num_bytes].view(kind).reshape(shape)

    def find_shadow(self, address: int) -> SlabPlace | None:
        """In which shadow `address` is, and where."""
        for number, num_bytes in enumerate(self._shadowed):
            first = address - self._shadows[number].ctypes.data
            if 0 <= first < num_bytes:
                return SlabPlace(number, first)
        return None

    def find(self, address: int) -> SlabPlace | None:
        """Where in the slab `address` is."""
        for number, (part, used) in enumerate(zip(self._parts, self._used, strict=True)):
            first = address - part.data_ptr()
            if 0 <= first < used:
                return SlabPlace(number, first)
        return None

    def put(self, tensor: Tensor) -> SlabPlace:
        """Copy a tensor into the slab."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        array = self.empty((flat.numel(),), np.uint8)
        torch.from_numpy(array).copy_(flat)
        return SlabPlace(len(self._parts) - 1, self._used[-1] - flat.numel())

    def filled(self) -> list[Tensor]:
        """What is used of each part, as uint8."""
        return [part[:used] for part, used in zip(self._parts, self._used, strict=True)]
