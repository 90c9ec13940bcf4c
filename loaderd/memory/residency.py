"""Blocks brought into a pool and held there: the pool's decisions, carried out."""

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.io.reader import BlockReader
from blockstore.pool import BlockPool, Hold


class Held(NamedTuple):
    """Blocks that stay where they are until `drop`."""

    slots: NDArray[np.int64]
    left_out: NDArray[np.int64]  # blocks for which the pool had no slot


class Residency:
    """Holds blocks of some files of a reader for worker threads; reads what is absent."""

    def __init__(
        self, pool: BlockPool, reader: BlockReader, first_file: int, changed: threading.Condition
    ) -> None:
        """File f of the pool is file `first_file + f` of the reader; `changed` guards the pool."""
        self.pool, self._reader, self._first_file, self._changed = pool, reader, first_file, changed
        # blocks that were wanted, counted under `changed`; a whole file that is here counts as one
        self.hits = self.misses = 0

    def hold_file(self, file: int) -> bool:
        """Hold a file that is wholly present; False where it is not."""
        with self._changed:
            whole = self.pool.hold_file(file)
            self.hits += whole
            return whole

    def drop_file(self, file: int) -> None:
        """Undo one `hold_file`."""
        with self._changed:
            self.pool.drop_file(file)
            self._changed.notify_all()

    def present(self, file: int, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks are here, or on their way."""
        with self._changed:
            return self.pool.present_mask(file, blocks)

    def hold(self, file: int, blocks: NDArray[np.int64], min_age: int = 0) -> Held:
        """Hold distinct, ascending blocks, reading those that are absent and can get a slot.

        Raises CorruptBlock, OSError: a block could not be read; nothing is held then.
        """
        with self._changed:
            hold = self.pool.hold(file, blocks, min_age)
            self.hits += hold.num_present
            self.misses += hold.blocks.size - hold.num_present + hold.left_out.size
        n = hold.num_present
        wanted, slots = hold.blocks[n:], hold.slots[n:]
        try:
            if wanted.size:
                self._reader.read(self._first_file + file, wanted, slots)
        except BaseException:
            with self._changed:
                self.pool.failed(file, wanted, slots)
                self.pool.drop(hold.slots)
                self._changed.notify_all()
            raise
        with self._changed:
            self.pool.loaded(file, wanted, slots)
            self._changed.notify_all()
            self._wait(file, hold)
        return Held(hold.slots, hold.left_out)

    def drop(self, held: Held) -> None:
        """Let the pool have the blocks again."""
        if held.slots.size:
            with self._changed:
                self.pool.drop(held.slots)
                self._changed.notify_all()

    def tick(self) -> None:
        """One more batch has begun: ages are counted in these."""
        with self._changed:
            self.pool.tick += 1

    def _wait(self, file: int, hold: Hold) -> None:
        """Until other threads have read what they began; raises if one of them failed."""
        slots = hold.slots[: hold.num_present]
        self._changed.wait_for(lambda: self.pool.settled(file, slots))
        lost = self.pool.lost(slots)
        if lost.any():
            self.pool.drop(hold.slots)
            self._changed.notify_all()
            block = int(hold.blocks[: hold.num_present][lost][0])
            of = self._reader.files[self._first_file + file]
            shard, offset = of.geometry.locate(block)
            raise CorruptBlock(
                f"{of.shards[shard]}+{offset}: block {block} could not be read for another batch"
            )
