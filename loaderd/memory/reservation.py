"""Who may pin how many slots of the graph pool, and when: the one rule.  Pure.

Blocks of the graph are pinned on one of three accounts:

    worker    a worker thread, for the batch that it builds: at most `worker_blocks` at a time, and
              it holds nothing else of the pool while it asks for them
    shared    sampling for many batches together, what it reads ahead, and `load`: counted in
              blocks, all of them together
    file      a relation that is wholly present, pinned at once by whoever samples from it

The rule: a pool owns at least `required()` slots, at any time.  That is what the shared account and
the files have pinned, and the whole reserve of the workers beside it, so that a worker's blocks
always find a slot.  A pool that owns a slot for every block of the graph needs no reserve.

    pin on the shared account    as many as keep the rule; the others wait until some are dropped
    pin a file                   if it keeps the rule; else its blocks are asked for one by one
    take slots out of the pool   as many as keep the rule, and never below `minimum`

While somebody waits for slots of the pool, shared pins and files are admitted as if the pool had
given these away: who waits is served as soon as what is pinned has been used.
"""

import enum
from collections.abc import Sequence

from blockstore.errors import PoolBroken

WORKER_BLOCKS = 2  # that one worker pins at a time
SHARED_BLOCKS = 2  # that the shared account can always have: one in use, one read meanwhile


class Account(enum.Enum):
    """On whose account blocks are pinned one by one."""

    WORKER = enum.auto()
    SHARED = enum.auto()


def least_slots(num_blocks: int, workers: int, worker_blocks: int = WORKER_BLOCKS) -> int:
    """Slots with which a graph of so many blocks can be sampled by so many workers."""
    return min(max(1, num_blocks), workers * worker_blocks + SHARED_BLOCKS)


class Reservation:
    """What is pinned on each account.  Its owner calls it under the lock of the pool."""

    def __init__(
        self, num_blocks: Sequence[int], workers: int, worker_blocks: int = WORKER_BLOCKS
    ) -> None:
        """`num_blocks` of each file of the pool."""
        self.worker_blocks, self._workers = worker_blocks, workers
        self._num_blocks, self._total = list(num_blocks), sum(num_blocks)
        self._file_pins = [0] * len(num_blocks)
        self.pinned = dict.fromkeys(Account, 0)  # blocks, one that two pin counts twice
        self.file_blocks = 0  # of the files that are pinned
        self.wanted = 0  # slots of the arena that somebody waits for

    def required(self, file_blocks: int = 0) -> int:
        """Slots that the pool must own, with so many blocks of files more."""
        files = self.file_blocks + file_blocks
        shared = max(SHARED_BLOCKS, self.pinned[Account.SHARED])
        reserve = min(self._workers * self.worker_blocks, self._total - files)
        return min(self._total, files + shared + reserve)

    def shared_room(self, owned: int) -> int:
        """Blocks that the shared account may have in all, of a pool that owns so many slots."""
        owned = self._after_waiting(owned)
        if owned >= self._total:
            return self._total
        reserve = min(self._workers * self.worker_blocks, self._total - self.file_blocks)
        return max(SHARED_BLOCKS, owned - self.file_blocks - reserve)

    def admit(self, account: Account, count: int, owned: int) -> int:
        """How many of `count` blocks may be pinned now; these count as pinned from now on.

        A worker's blocks are pinned all at once, or not yet.
        """
        if account is Account.WORKER:
            most = self._workers * self.worker_blocks - self.pinned[account]
            admitted = count if count <= most else 0
        else:
            most = self.shared_room(owned) - self.pinned[account]
            admitted = max(0, min(count, most))
        self.pinned[account] += admitted
        return admitted

    def release(self, account: Account, count: int) -> None:
        if count > self.pinned[account]:
            raise PoolBroken(f"{count} graph blocks given back, {self.pinned[account]} are pinned")
        self.pinned[account] -= count

    def admit_file(self, file: int, owned: int) -> bool:
        """Whether a complete file may be pinned; it counts as pinned then."""
        more = 0 if self._file_pins[file] else self._num_blocks[file]
        if self._after_waiting(owned) < self.required(file_blocks=more):
            return False
        self._file_pins[file] += 1
        self.file_blocks += more
        return True

    def release_file(self, file: int) -> None:
        """A complete file is pinned once less.  Raises PoolBroken: it is not pinned."""
        if self._file_pins[file] == 0:
            raise PoolBroken(f"file {file} of the graph is given back, it is not pinned")
        self._file_pins[file] -= 1
        if self._file_pins[file] == 0:
            self.file_blocks -= self._num_blocks[file]

    @property
    def minimum(self) -> int:
        """Slots that the pool always keeps."""
        return least_slots(self._total, self._workers, self.worker_blocks)

    @property
    def idle(self) -> bool:
        return not any(self.pinned.values()) and not any(self._file_pins)

    def _after_waiting(self, owned: int) -> int:
        """Slots that the pool will own after those who wait have taken theirs."""
        return min(owned, max(self.minimum, owned - self.wanted))
