"""Which blocks sit in which arena slots: pins, last use and eviction.  No I/O, no lock."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import PoolBroken

# in _file: a slot whose block could not be read, not of this pool, without a block
_LOST, _FOREIGN, _FREE = -3, -2, -1


class Hold(NamedTuple):
    """What `BlockPool.hold` decided for the blocks of one file."""

    blocks: NDArray[np.int64]  # pinned now, present ones first
    slots: NDArray[np.int64]  # where they are, or will be once read
    num_present: int  # the first ones; the rest is for the caller to read, then `loaded`
    left_out: NDArray[np.int64]  # no slot could be had; not pinned


class BlockPool:
    """Blocks in slots.  A block is pinned while somebody uses it; the longest unused goes first.

    `slot_of_block[file]` int32 (num_blocks,) is what kernels read: the slot of a block whose bytes
    are there, else -1.
    """

    def __init__(self, num_blocks: Sequence[int], num_slots: int) -> None:
        """`num_blocks` of each file; `num_slots` of the whole arena (the pool owns none yet)."""
        self.slot_of_block = [np.full(n, -1, np.int32) for n in num_blocks]
        self._where = [np.full(n, -1, np.int32) for n in num_blocks]  # present or being read
        self._present = [0] * len(num_blocks)
        self._file = np.full(num_slots, _FOREIGN, np.int32)
        self._block = np.zeros(num_slots, np.int64)
        self._pins = np.zeros(num_slots, np.int32)
        self._used = np.zeros(num_slots, np.int64)
        self._file_pins = np.zeros(len(num_blocks) + 1, np.int64)  # [-1]: slots without a block
        self.num_owned = 0
        self.tick = 0  # of use: whoever holds counts it up

    def add_slots(self, slots: Iterable[int]) -> None:
        index = np.fromiter(slots, np.int64)
        if (self._file[index] != _FOREIGN).any():
            raise PoolBroken("slots are added to a pool that has them")
        self._file[index] = _FREE
        self._used[index] = -1
        self.num_owned += index.size

    def remove_slots(self, slots: NDArray[np.int64]) -> bool:
        """Give up distinct slots; False, and nothing done, while one is pinned."""
        if not self._evictable(slots).all():
            return False
        self._evict(slots)
        self._file[slots] = _FOREIGN
        self.num_owned -= slots.size
        return True

    def owned(self) -> NDArray[np.bool_]:
        """Mask over the arena's slots: those of this pool."""
        mask: NDArray[np.bool_] = self._file != _FOREIGN
        return mask

    def pinned(self) -> NDArray[np.bool_]:
        """Mask over the arena's slots: those that cannot be given up at present."""
        return self.owned() & ~self._evictable(np.arange(self._file.size))

    def complete(self, file: int) -> bool:
        return self._present[file] == self.slot_of_block[file].size

    def num_present(self, file: int) -> int:
        """Blocks of the file whose bytes are there."""
        return self._present[file]

    @property
    def num_empty(self) -> int:
        return int((self._file == _FREE).sum())

    @property
    def has_lost(self) -> bool:
        """Whether somebody still holds a slot of a block that could not be read."""
        return bool((self._file == _LOST).any())

    def absent(self, file: int) -> NDArray[np.int64]:
        """Blocks of the file that are neither present nor being read."""
        return np.flatnonzero(self._where[file] < 0)

    def present_mask(self, file: int, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `blocks` are present or being read."""
        return self._where[file][blocks] >= 0

    def hold_file(self, file: int) -> bool:
        """Pin a file that is complete, at no cost per block; False where it is not."""
        if not self.complete(file):
            return False
        self._file_pins[file] += 1
        return True

    def drop_file(self, file: int) -> None:
        """Unpin a file once.  Raises PoolBroken: it is not pinned."""
        if self._file_pins[file] == 0:
            raise PoolBroken(f"file {file} is dropped, nobody holds it")
        self._file_pins[file] -= 1

    def hold(self, file: int, blocks: NDArray[np.int64], min_age: int = 0) -> Hold:
        """Pin distinct blocks; those absent get a slot that is free or unused for `min_age` ticks.

        The caller reads the blocks after `num_present` and then calls `loaded` (or `failed`).  A
        block in another caller's hands counts as present: wait until `slot_of_block` shows it.
        """
        return self._pin(file, blocks, *self._choose(file, blocks, min_age))

    def hold_all(self, file: int, blocks: NDArray[np.int64]) -> Hold | None:
        """The same for all of the blocks; None, and nothing is done, where some find no slot."""
        here, slots = self._choose(file, blocks, 0)
        if slots.size < blocks.size - int(here.sum()):
            return None
        return self._pin(file, blocks, here, slots)

    def _choose(
        self, file: int, blocks: NDArray[np.int64], min_age: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which of the blocks are present or being read, and slots for the others."""
        where = self._where[file][blocks]
        here = where >= 0
        return here, self._candidates(blocks.size - int(here.sum()), min_age, where[here])

    def _pin(
        self,
        file: int,
        blocks: NDArray[np.int64],
        here: NDArray[np.bool_],
        slots: NDArray[np.int64],
    ) -> Hold:
        """Pin what is here, and what gets these slots."""
        found = self._where[file][blocks[here]].astype(np.int64)
        absent = blocks[~here]
        taken, left_out = absent[: slots.size], absent[slots.size :]
        hold = Hold(
            np.concatenate([blocks[here], taken]),
            np.concatenate([found, slots]),
            found.size,
            left_out,
        )
        self._evict(slots)  # first: it may find no memory, and nothing is pinned then
        self._pins[found] += 1
        self._used[found] = self.tick
        self._file[slots], self._block[slots] = file, taken
        self._pins[slots], self._used[slots] = 1, self.tick
        self._where[file][taken] = slots
        return hold

    def loaded(self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """The bytes of these held blocks are in their slots now."""
        self.slot_of_block[file][blocks] = slots
        self._present[file] += blocks.size

    def failed(self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """These held blocks could not be read.  Whoever holds one, this caller too, drops its slot.

        Until the last one did, the slots stay what they are: `lost`.
        """
        self._where[file][blocks] = -1
        self._file[slots], self._used[slots] = _LOST, -1

    def settled(self, file: int, slots: NDArray[np.int64]) -> bool:
        """Whether no held slot of these is being read into: each holds its block, or lost it."""
        there = self.slot_of_block[file][self._block[slots]] == slots
        return bool((there | self.lost(slots)).all())

    def lost(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these held slots belong to a block that could not be read."""
        result: NDArray[np.bool_] = self._file[slots] == _LOST
        return result

    def drop(self, slots: NDArray[np.int64]) -> None:
        """Unpin held blocks by their slots."""
        if (self._pins[slots] == 0).any():
            raise PoolBroken("slots are dropped that nobody holds")
        self._pins[slots] -= 1
        self._file[slots[(self._file[slots] == _LOST) & (self._pins[slots] == 0)]] = _FREE

    def _evictable(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        file = self._file[slots]
        free = (file != _FOREIGN) & (self._pins[slots] == 0)
        result: NDArray[np.bool_] = free & (self._file_pins[np.maximum(file, -1)] == 0)
        return result

    def _candidates(self, count: int, min_age: int, kept: NDArray[np.int32]) -> NDArray[np.int64]:
        """Up to `count` slots for new blocks but for those `kept`: free, then longest unused."""
        if count == 0:
            return np.empty(0, np.int64)
        evictable = self._evictable(np.arange(self._file.size))
        evictable[kept] = False
        candidates = np.flatnonzero(evictable)
        if min_age:
            used = self._used[candidates]
            candidates = candidates[(used < 0) | (used <= self.tick - min_age)]
        if candidates.size > count:
            oldest = np.argsort(self._used[candidates], kind="stable")[:count]
            candidates = np.sort(candidates[oldest])
        return candidates

    def _evict(self, slots: NDArray[np.int64]) -> None:
        file, block = self._file[slots], self._block[slots]
        for f in np.unique(file[file >= 0]):
            blocks = block[file == f]
            self._present[f] -= int((self.slot_of_block[f][blocks] >= 0).sum())
            self.slot_of_block[f][blocks] = -1
            self._where[f][blocks] = -1
        self._file[slots] = _FREE
        self._used[slots] = -1
