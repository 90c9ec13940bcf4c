"""Blocks brought into a pool and held there: the pool's decisions, carried out."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.errors import CorruptBlock, PoolBroken
from blockstore.io.reader import BlockReader
from blockstore.pool import BlockPool, Hold
from loaderd.memory.reservation import Account, Reservation


class PinnedBlocks(NamedTuple):
    """Blocks that stay where they are until `drop`."""

    slots: NDArray[np.int64]
    left_out: NDArray[np.int64]  # blocks that got no slot
    account: Account | None = None  # that they are pinned on, where a reservation counts them


class Residency:
    """Holds blocks of some files of a reader for worker threads; reads what is absent."""

    def __init__(
        self,
        pool: BlockPool,
        reader: BlockReader,
        first_file: int,
        changed: concurrency.Condition,
        reservation: Reservation | None = None,
    ) -> None:
        """File f of the pool is file `first_file + f` of the reader; `changed` guards the pool.

        reservation   who may pin how much; None: whatever finds a slot
        """
        self.pool, self._reader, self._first_file, self._changed = pool, reader, first_file, changed
        self.reservation = reservation
        # blocks that were wanted, counted under `changed`; a whole file that is here counts as one
        self.hits = self.misses = 0
        self._failure = ""  # why blocks could last not be read; under `changed`

    @property
    def worker_blocks(self) -> int:
        assert self.reservation is not None
        return self.reservation.worker_blocks

    @property
    def shared_room(self) -> int:
        """Blocks that may be held at a time, at present, by all that hold them for many batches."""
        assert self.reservation is not None
        with self._changed:
            return self.reservation.shared_room(self.pool.num_owned)

    def hold_file(self, file: int) -> bool:
        """Hold a file that is wholly present; False: it is not, or others need the slots."""
        with self._changed:
            whole = self.pool.complete(file) and (
                self.reservation is None or self.reservation.admit_file(file, self.pool.num_owned)
            )
            if whole:
                self.pool.hold_file(file)
            self.hits += whole
            return whole

    def drop_file(self, file: int) -> None:
        """Unpin a file once, after `hold_file` returned True."""
        with self._changed:
            self.pool.drop_file(file)
            if self.reservation is not None:
                self.reservation.release_file(file)
            self._changed.notify_all()

    def present(self, file: int, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        with self._changed:
            return self.pool.present_mask(file, blocks)

    def load(self, file: int) -> None:
        """Read blocks that are absent into slots that hold none, as far as others leave room.

        Nothing is waited for but the disk, and nothing has to leave.  Raises CorruptBlock, OSError.
        """
        assert self.reservation is not None
        while True:
            with self._changed:
                pool, reservation = self.pool, self.reservation
                room = reservation.shared_room(pool.num_owned)
                room -= reservation.pinned[Account.SHARED]
                blocks = pool.absent(file)[: max(0, min(room, pool.num_empty))]
                if not blocks.size:
                    return
                hold = self._claim(file, blocks, 0, Account.SHARED)
            self.drop(self._read(file, hold, Account.SHARED))

    def hold(
        self, file: int, blocks: NDArray[np.int64], min_age: int = 0, account: Account | None = None
    ) -> PinnedBlocks:
        """Hold distinct, ascending blocks, reading those that are absent and can get a slot.

        account   of a pool with a reservation: a worker waits until all of its blocks find a slot,
                  others until some do

        Raises CorruptBlock, OSError: a block could not be read; nothing is held then.
        """
        with self._changed:
            hold = self._claim(file, blocks, min_age, account)
        return self._read(file, hold, account)

    def _claim(
        self, file: int, blocks: NDArray[np.int64], min_age: int, account: Account | None
    ) -> Hold:
        """Slots for blocks, as the reservation admits them; called under the lock."""
        if account is None:
            hold = self.pool.hold(file, blocks, min_age)
        else:
            found: list[Hold] = []
            self._changed.wait_for(lambda: self._admit(file, blocks, account, found))
            (hold,) = found
        self.hits += hold.num_present
        self.misses += hold.blocks.size - hold.num_present + hold.left_out.size
        return hold

    def _admit(
        self, file: int, blocks: NDArray[np.int64], account: Account, found: list[Hold]
    ) -> bool:
        """Put into `found` what can be pinned now; False: nothing can.

        Raises PoolBroken: what is pinned leaves less than the reservation says.
        """
        reservation, pool = self.reservation, self.pool
        assert reservation is not None
        if account is Account.WORKER and blocks.size > reservation.worker_blocks:
            raise PoolBroken(
                f"a worker asks for {blocks.size} graph blocks at a time, expected at most "
                f"{reservation.worker_blocks}"
            )
        count = reservation.admit(account, blocks.size, pool.num_owned)
        if count == 0 and blocks.size:
            return False
        try:
            hold = pool.hold_all(file, blocks[:count])
        except BaseException:
            reservation.release(account, count)
            raise
        if hold is None:
            reservation.release(account, count)
            # a block that could not be read keeps its slot until all who waited for it were told
            if pool.has_lost:
                return False
            raise PoolBroken(
                f"{count} graph blocks find no slot though they are reserved: {pool.num_owned} "
                f"slots, pinned {dict(reservation.pinned)} and {reservation.file_blocks} in files"
            )
        found.append(hold._replace(left_out=blocks[count:]))
        return True

    def _read(self, file: int, hold: Hold, account: Account | None) -> PinnedBlocks:
        """Read what was claimed, and wait for what others read."""
        n, held = hold.num_present, PinnedBlocks(hold.slots, hold.left_out, account)
        wanted, slots = hold.blocks[n:], hold.slots[n:]
        try:
            if wanted.size:
                self._reader.read(self._first_file + file, wanted, slots)
        except BaseException as error:
            with self._changed:
                self._failure = str(error)
                self.pool.failed(file, wanted, slots)
                self._unpin(held)
            raise
        # first what this thread has read is there for others, then it waits for what they read: two
        # threads that wait for each other's blocks go on
        with self._changed:
            self.pool.loaded(file, wanted, slots)
            self._changed.notify_all()
            self._wait(file, hold, account)
        return held

    def drop(self, held: PinnedBlocks) -> None:
        if held.slots.size:
            with self._changed:
                self._unpin(held)

    def _unpin(self, held: PinnedBlocks) -> None:
        """Give back slots, and what the reservation counts of them; called under the lock."""
        self.pool.drop(held.slots)
        if held.account is not None and self.reservation is not None:
            self.reservation.release(held.account, held.slots.size)
        self._changed.notify_all()

    def tick(self) -> None:
        """One more batch has begun: ages are counted in these."""
        with self._changed:
            self.pool.tick += 1

    def _wait(self, file: int, hold: Hold, account: Account | None = None) -> None:
        """Until other threads have read what they began; raises if one of them failed."""
        slots = hold.slots[: hold.num_present]
        try:
            self._changed.wait_for(lambda: self.pool.settled(file, slots))
            lost = self.pool.lost(slots)
            if lost.any():
                block = int(hold.blocks[: hold.num_present][lost][0])
                of = self._reader.files[self._first_file + file]
                shard, offset = of.geometry.locate(block)
                raise CorruptBlock(
                    f"{of.shards[shard]}+{offset}: block {block} could not be read for another "
                    f"batch: {self._failure}"
                )
        except BaseException:
            self._unpin(PinnedBlocks(hold.slots, hold.left_out, account))
            raise
