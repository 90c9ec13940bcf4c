"""Blocks of files in arena slots: which blocks stay, how many may be pinned, and reading them.

`BlockPool` and `GraphPool` decide, without I/O, lock or thread; `Residency` carries it out.

Blocks of the graph are pinned on one of three accounts:

    worker    a worker thread, for the batch that it builds: at most `worker_blocks` at a time, and
              it holds nothing else of the pool while it asks for them
    shared    sampling for many batches together, its read-ahead, and `load`: one count of blocks
              for all of them
    file      a relation that is wholly present, pinned as a whole while it is sampled from

The rule: at any time, a graph pool owns at least `required()` slots.  These are the slots that the
shared account and the files have pinned, plus the whole reserve of the workers, so that a worker's
blocks always find a slot.  A pool with a slot for every block of the graph needs no reserve.

    pin on the shared account    as many as keep the rule; the others wait until some are dropped
    pin a file                   if it keeps the rule; else its blocks are asked for one by one
    take slots out of the pool   as many as keep the rule, and never below `minimum`

While somebody waits for slots of the pool, shared pins and files are admitted as if the pool had
already given these away: waiting requests are served as soon as pinned blocks are dropped.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.errors import CorruptBlock, PoolBroken
from blockstore.io.reader import BlockReader

WORKER_BLOCKS = 2  # blocks that one worker may pin at a time
SHARED_BLOCKS = 2  # blocks that the shared account can always pin: one in use, one being read
# values in _file: the slot's block could not be read; it is another pool's; it has no block
_LOST, _FOREIGN, _FREE = -3, -2, -1


class Account(enum.Enum):
    """The account that a single pinned block is charged to."""

    WORKER = enum.auto()
    SHARED = enum.auto()


class PinnedBlocks(NamedTuple):
    """Blocks of one file that stay where they are until they are dropped."""

    blocks: NDArray[np.int64]  # present ones first
    slots: NDArray[np.int64]  # where they are, or will be once read
    num_present: int  # the first ones; the caller reads the rest, then calls `loaded`
    left_out: NDArray[np.int64]  # not pinned, for lack of slots
    account: Account | None = None  # that they are charged to, in a `GraphPool`


def min_slots(num_blocks: int, workers: int, worker_blocks: int = WORKER_BLOCKS) -> int:
    """Fewest slots with which `workers` can sample from a graph of `num_blocks`."""
    return min(max(1, num_blocks), workers * worker_blocks + SHARED_BLOCKS)


class BlockPool:
    """Blocks in slots, evicted least recently used first.  A block is pinned while it is in use.

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
        self._total = sum(num_blocks)
        self.num_owned = 0
        self.tick = 0  # ages of blocks are counted in these, see `Residency.tick`

    def add_slots(self, slots: Iterable[int]) -> None:
        index = np.fromiter(slots, np.int64)
        if (self._file[index] != _FOREIGN).any():
            raise PoolBroken("slots are added to a pool that has them")
        self._file[index] = _FREE
        self._used[index] = -1
        self.num_owned += index.size

    def remove_slots(self, slots: NDArray[np.int64]) -> bool:
        """Give up distinct slots; returns False, and does nothing, while one of them is pinned."""
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

    def hold_file(self, file: int, whole: bool = True) -> bool:
        """Pin a complete file, at no cost per block; returns False if it is not complete.

        whole   False: an incomplete file is pinned, too, if all blocks of all files have slots:
                its blocks that are there, and those that are read while it is pinned
        """
        if not self.complete(file) and (whole or self.num_owned < self._total):
            return False
        self._file_pins[file] += 1
        return True

    def drop_file(self, file: int) -> None:
        """Unpin a file once.  Raises PoolBroken: it is not pinned."""
        if self._file_pins[file] == 0:
            raise PoolBroken(f"file {file} is dropped, nobody holds it")
        self._file_pins[file] -= 1

    def hold(self, file: int, blocks: NDArray[np.int64], min_age: int = 0) -> PinnedBlocks:
        """Pin distinct blocks; absent ones get slots that are free or unused for `min_age` ticks.

        If slots are few, the first blocks get them.  The caller reads the blocks after
        `num_present` and then calls `loaded` (or `failed`).  A block that another caller is reading
        counts as present: wait until `slot_of_block` shows it.
        """
        return self._pin(file, blocks, *self._choose(file, blocks, min_age))

    def try_hold(
        self, file: int, blocks: NDArray[np.int64], min_age: int, account: Account | None
    ) -> PinnedBlocks | None:
        """As `hold`, on an account; None: nothing can be pinned before others drop their blocks."""
        assert account is None
        return self.hold(file, blocks, min_age)

    def unpin(self, held: PinnedBlocks) -> None:
        """Give back what `try_hold` pinned."""
        self.drop(held.slots)

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
    ) -> PinnedBlocks:
        """Pin the blocks that are here, and the absent ones that get these slots."""
        found = self._where[file][blocks[here]].astype(np.int64)
        absent = blocks[~here]
        taken, left_out = absent[: slots.size], absent[slots.size :]
        held = PinnedBlocks(
            np.concatenate([blocks[here], taken]),
            np.concatenate([found, slots]),
            found.size,
            left_out,
        )
        self._evict(slots)  # first: if it fails for lack of memory, nothing is pinned
        self._pins[found] += 1
        self._used[found] = self.tick
        self._file[slots], self._block[slots] = file, taken
        self._pins[slots], self._used[slots] = 1, self.tick
        self._where[file][taken] = slots
        return held

    def loaded(self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """The bytes of these held blocks are in their slots now."""
        self.slot_of_block[file][blocks] = slots
        self._present[file] += blocks.size

    def failed(self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """These held blocks could not be read.  Every holder, this caller too, drops their slots.

        Until the last holder has done so, the slots stay `lost`.
        """
        self._where[file][blocks] = -1
        self._file[slots], self._used[slots] = _LOST, -1

    def settled(self, file: int, slots: NDArray[np.int64]) -> bool:
        """Whether none of these held slots is being read into: each has its block, or is lost."""
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
        """Up to `count` slots for new blocks, none of `kept`: free, then least recently used."""
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


class GraphPool(BlockPool):
    """Blocks of the graph, pinned on accounts by the rule above."""

    def __init__(
        self,
        num_blocks: Sequence[int],
        num_slots: int,
        workers: int,
        worker_blocks: int = WORKER_BLOCKS,
    ) -> None:
        super().__init__(num_blocks, num_slots)
        self.worker_blocks, self._reserve = worker_blocks, workers * worker_blocks
        # slots that the pool always keeps
        self.minimum = min_slots(self._total, workers, worker_blocks)
        self.on_account = dict.fromkeys(Account, 0)  # blocks; one that is pinned twice counts twice
        self.file_blocks = 0  # blocks of the files that are pinned
        self.wanted = 0  # slots that somebody waits for

    def required(self, file_blocks: int = 0) -> int:
        """Slots that the pool must own once `file_blocks` more blocks of files are pinned."""
        files = self.file_blocks + file_blocks
        shared = max(SHARED_BLOCKS, self.on_account[Account.SHARED])
        return min(self._total, files + shared + min(self._reserve, self._total - files))

    @property
    def missing(self) -> int:
        """Slots that it lacks to hold all blocks."""
        return max(0, self._total - self.num_owned)

    def shared_room(self) -> int:
        """Blocks that the shared account may pin in all."""
        if (owned := self._after_waiting()) >= self._total:
            return self._total
        reserve = min(self._reserve, self._total - self.file_blocks)
        return max(SHARED_BLOCKS, owned - self.file_blocks - reserve)

    def hold_file(self, file: int, whole: bool = True) -> bool:
        more = 0 if self._file_pins[file] else self.slot_of_block[file].size
        if self._after_waiting() < self.required(more) or not super().hold_file(file, whole):
            return False
        self.file_blocks += more
        return True

    def drop_file(self, file: int) -> None:
        super().drop_file(file)
        if not self._file_pins[file]:
            self.file_blocks -= self.slot_of_block[file].size

    def try_hold(
        self, file: int, blocks: NDArray[np.int64], min_age: int, account: Account | None
    ) -> PinnedBlocks | None:
        """Pin all of a worker's blocks, or none yet; of others, as many as the rule allows.

        Raises PoolBroken: pinned blocks leave fewer slots than the rule says.
        """
        assert account is not None
        if account is Account.WORKER:
            if blocks.size > self.worker_blocks:
                raise PoolBroken(
                    f"a worker asks for {blocks.size} graph blocks at a time, expected at most "
                    f"{self.worker_blocks}"
                )
            room = self._reserve - self.on_account[account]
            count = blocks.size if blocks.size <= room else 0
        else:
            count = max(0, min(blocks.size, self.shared_room() - self.on_account[account]))
        if count == 0 and blocks.size:
            return None
        here, slots = self._choose(file, blocks[:count], min_age)
        if slots.size < count - int(here.sum()):
            # a block that could not be read keeps its slot until all that waited for it are told
            if self.has_lost:
                return None
            raise PoolBroken(
                f"{count} graph blocks find no slot though they are reserved: {self.num_owned} "
                f"slots, pinned {self.on_account} and {self.file_blocks} in files"
            )
        held = self._pin(file, blocks[:count], here, slots)
        self.on_account[account] += count
        return held._replace(left_out=blocks[count:], account=account)

    def unpin(self, held: PinnedBlocks) -> None:
        super().unpin(held)
        assert held.account is not None
        self.on_account[held.account] -= held.slots.size

    def _after_waiting(self) -> int:
        """Slots that the pool will own after waiting requests have taken theirs."""
        return min(self.num_owned, max(self.minimum, self.num_owned - self.wanted))


PoolT_co = TypeVar("PoolT_co", bound=BlockPool, covariant=True)


class Residency(Generic[PoolT_co]):
    """Holds blocks of some files of a reader for worker threads; reads what is absent."""

    def __init__(
        self,
        pool: PoolT_co,
        reader: BlockReader,
        first_file: int,
        changed: concurrency.Condition,
    ) -> None:
        """File f of the pool is file `first_file + f` of the reader; `changed` guards the pool."""
        self.pool, self._reader, self._first_file, self._changed = pool, reader, first_file, changed
        # requested blocks, counted under `changed`; a whole file that is present counts as one
        self.hits = self.misses = 0
        self._failure = ""  # the last error of reading blocks; under `changed`

    def shared_room(self: "Residency[GraphPool]") -> int:
        """Blocks that the shared account may hold in all, at present."""
        with self._changed:
            return self.pool.shared_room()

    def hold_file(self, file: int, whole: bool = True) -> bool:
        """As `BlockPool.hold_file`; False, too, if others need the slots."""
        with self._changed:
            held = self.pool.hold_file(file, whole)
            self.hits += held
            return held

    def drop_file(self, file: int) -> None:
        """Unpin a file once, after `hold_file` returned True."""
        with self._changed:
            self.pool.drop_file(file)
            self._changed.notify_all()

    def present(self, file: int, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        with self._changed:
            return self.pool.present_mask(file, blocks)

    def load(self: "Residency[GraphPool]", file: int) -> None:
        """Read absent blocks into empty slots, as far as others leave room.

        Waits for nothing but the disk, and evicts nothing.  Raises CorruptBlock, OSError.
        """
        while True:
            with self._changed:
                pool = self.pool
                room = pool.shared_room() - pool.on_account[Account.SHARED]
                blocks = pool.absent(file)[: max(0, min(room, pool.num_empty))]
                if not blocks.size:
                    return
                held = self._claim(file, blocks, 0, Account.SHARED)
            self._read(file, held)
            self.drop(held)

    def hold(
        self, file: int, blocks: NDArray[np.int64], min_age: int = 0, account: Account | None = None
    ) -> PinnedBlocks:
        """Hold distinct blocks, reading those that are absent and can get a slot, first ones first.

        account   of a `GraphPool`: a worker waits until all of its blocks find a slot, others until
                  some do

        Raises CorruptBlock, OSError: a block could not be read; nothing is held then.
        """
        with self._changed:
            held = self._claim(file, blocks, min_age, account)
        self._read(file, held)
        return held

    def _claim(
        self, file: int, blocks: NDArray[np.int64], min_age: int, account: Account | None
    ) -> PinnedBlocks:
        """Slots for blocks, as soon as the pool has some; called under the lock."""
        if (held := self.pool.try_hold(file, blocks, min_age, account)) is None:
            found: list[PinnedBlocks] = []

            def try_again() -> bool:
                if (later := self.pool.try_hold(file, blocks, min_age, account)) is not None:
                    found.append(later)
                return bool(found)

            self._changed.wait_for(try_again)
            (held,) = found
        self.hits += held.num_present
        self.misses += held.blocks.size - held.num_present + held.left_out.size
        return held

    def _read(self, file: int, held: PinnedBlocks) -> None:
        """Read what was claimed, and wait for what others read; nothing is held after an error."""
        wanted, slots = held.blocks[held.num_present :], held.slots[held.num_present :]
        try:
            if wanted.size:
                order = np.argsort(wanted)
                wanted, slots = wanted[order], slots[order]
                self._reader.read(self._first_file + file, wanted, slots)
        except BaseException as error:
            with self._changed:
                self._failure = str(error)
                self.pool.failed(file, wanted, slots)
                self._unpin(held)
            raise
        # publish what this thread has read before waiting for what others read: else two threads
        # could wait for each other's blocks forever
        with self._changed:
            self.pool.loaded(file, wanted, slots)
            self._changed.notify_all()
            self._wait(file, held)

    def drop(self, held: PinnedBlocks) -> None:
        if held.slots.size:
            with self._changed:
                self._unpin(held)

    def _unpin(self, held: PinnedBlocks) -> None:
        """Called under the lock."""
        self.pool.unpin(held)
        self._changed.notify_all()

    def tick(self) -> None:
        """Count a batch that has begun: ages are counted in batches."""
        with self._changed:
            self.pool.tick += 1

    def _wait(self, file: int, held: PinnedBlocks) -> None:
        """Wait until other threads have read what they began; raises CorruptBlock if one failed."""
        slots = held.slots[: held.num_present]
        try:
            self._changed.wait_for(lambda: self.pool.settled(file, slots))
            lost = self.pool.lost(slots)
            if lost.any():
                block = int(held.blocks[: held.num_present][lost][0])
                of = self._reader.files[self._first_file + file]
                raise CorruptBlock(
                    f"{of.where(block)}: block {block} could not be read for another batch: "
                    f"{self._failure}"
                )
        except BaseException:
            self._unpin(held)
            raise
