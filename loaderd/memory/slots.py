"""Owners of arena slots: two block pools, and the sessions that took slots out of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.errors import PoolBroken
from loaderd.api.errors import Refused, Shortage
from loaderd.memory.ledger import MIN_SESSION
from loaderd.memory.residency import BlockPool, GraphPool

SHORT_WAIT_S = 1.0  # as WAIT_S, if waiting longer does not help, or there is another way
WAIT_S = 20.0  # for batches in flight to give back slots that an attach needs


class RequestArea(NamedTuple):
    """Arena slots with the numbers of a request that is being received or served."""

    numbers: NDArray[np.int64]  # (Attach.ids,)
    slots: range
    slot_bytes: int
    broker: "SlotBroker"

    @property
    def num_bytes(self) -> int:
        return len(self.slots) * self.slot_bytes

    def give_back(self) -> None:
        self.broker.give(list(self.slots))


@dataclass(slots=True, eq=False)
class _Limit:
    left: int  # slots that may still be taken
    of_session: bool


class SlotBroker:
    """Takes slots out of the pools for workspaces and sessions, and puts them back.

    Each slot belongs to one of the two pools.  Slots are taken from the top of the row pool, and
    only then from the graph pool, as far as its rule allows.  They may go to the broker of
    another store.
    """

    def __init__(
        self,
        graph: GraphPool,
        rows: BlockPool,
        changed: concurrency.Condition,
        slots: Sequence[int],
        graph_slots: int,
        name_mem: Callable[[int], str],
    ) -> None:
        """`changed` guards both pools and is notified whenever a block is unpinned.

        slots         arena slots of this broker; the first `graph_slots` are the graph pool's
        name_mem      gives the --mem that would add so many slots
        """
        self._graph, self._rows, self._changed = graph, rows, changed
        self._name_mem = name_mem
        self.num_slots = len(slots)
        self._of_graph = np.zeros(graph.owned().size, np.bool_)
        self._of_graph[np.asarray(slots[:graph_slots], np.int64)] = True
        self._limits = concurrency.local()  # slots that this thread may still take, if `all` is set
        with changed:
            graph.add_slots(slots[:graph_slots])
            rows.add_slots(slots[graph_slots:])

    @property
    def graph_preferred(self) -> int:
        """Slots that the graph pool has while none is taken from it."""
        return int(self._of_graph.sum())

    def cede(self, count: int) -> list[int]:
        """Give up to `count` free slots away for good, row slots first; keeps enough to serve."""
        with self._changed:
            free = np.flatnonzero(self._free_mask())
            order = np.argsort(self._of_graph[free], kind="stable")
            return self._give_away(free[order][: min(count, self.spare())])

    def spare(self) -> int:
        """Slots that `cede` can give at present."""
        with self._changed:
            return max(0, min(int(self._free_mask().sum()), self._max_ceded()))

    def cede_run(self, count: int) -> range:
        """Give `count` adjacent free slots away for good; none of them if there is no such run."""
        with self._changed:
            first = _top_run(self._free_mask(), count)
            if first < 0 or count > self._max_ceded():
                return range(0)
            self._give_away(np.arange(first, first + count))
            return range(first, first + count)

    def _max_ceded(self) -> int:
        owned = self._rows.num_owned + self._graph.num_owned
        return owned - self._graph.minimum - MIN_SESSION

    def _give_away(self, slots: NDArray[np.int64]) -> list[int]:
        given = self._remove(slots)
        self.num_slots -= slots.size
        self._of_graph[slots] = False
        return given

    @property
    def whole(self) -> bool:
        """Whether no slot is taken, and no block pinned."""
        with self._changed:
            owned = self._rows.num_owned + self._graph.num_owned
            return owned == self.num_slots and self.pinned() == 0

    def retire(self) -> list[int]:
        """Give all slots away, none of which is pinned or taken."""
        with self._changed:
            owned = self._rows.owned() | self._graph.owned()
            slots = np.flatnonzero(owned)
            if slots.size != self.num_slots:
                raise PoolBroken(f"{slots.size} of {self.num_slots} slots are in the pools")
            return self._give_away(slots)

    def accept(self, slots: list[int], graph_preferred: int) -> None:
        """Accept slots that another broker gave away.

        graph_preferred   slots that the graph pool is to have from now on, as far as they are free
        """
        with self._changed:
            self._rows.add_slots(slots)
            self.num_slots += len(slots)
            missing = graph_preferred - self.graph_preferred
            free = np.flatnonzero(self._rows.owned() & ~self._rows.pinned())[: max(0, missing)]
            self._graph.add_slots(self._remove(free))
            self._of_graph[free] = True
            self._changed.notify_all()

    @contextmanager
    def at_most(self, count: int, of_session: bool = False) -> Iterator[None]:
        """Inside, this thread may take `count` slots, and the broker reports no more to it.

        of_session   a session's share, not its user's
        """
        limits = self._own_limits()
        limits.append(limit := _Limit(count, of_session))
        try:
            yield
        finally:
            limits.remove(limit)

    @contextmanager
    def for_others(self) -> Iterator[None]:
        """Inside, this thread takes slots for several sessions, and no one's share limits them."""
        limits = self._own_limits()
        shares = [limit for limit in limits if limit.of_session]
        limits[:] = [limit for limit in limits if not limit.of_session]
        try:
            yield
        finally:
            limits += shares

    def _own_limits(self) -> list["_Limit"]:
        """The limits of this thread, all of which count."""
        if not hasattr(self._limits, "all"):
            self._limits.all = list[_Limit]()
        found: list[_Limit] = self._limits.all
        return found

    @contextmanager
    def lent_to_graph(self) -> Iterator[None]:
        """Inside, the graph pool has free slots of the row pool, too, as far as it lacks any.

        They count as the row pool's.  If some are still in use after a while, the graph keeps them.
        """
        with self._changed:
            free = np.flatnonzero(self._free_mask() & self._rows.owned())
            lent = free[: self._graph.missing]
            self._graph.add_slots(self._remove(lent))
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                idle = self._wait_for_slots(lambda: self._idle(lent), lent.size, SHORT_WAIT_S)
                own = lent[self._graph.owned()[lent]]  # others may have taken some
                if idle:
                    self._rows.add_slots(self._remove(own))
                else:
                    self._of_graph[own] = True
                self._changed.notify_all()

    @property
    def graph_missing(self) -> int:
        """Blocks of the graph that the graph pool has no slot for at present."""
        with self._changed:
            return self._graph.missing

    def _num_lent(self) -> int:
        """Slots of the row pool that are lent to the graph."""
        return int((self._graph.owned() & ~self._of_graph).sum())

    def _idle(self, slots: NDArray[np.int64]) -> bool:
        """Whether those of these slots that are in the graph pool can be taken out of it."""
        own = slots[self._graph.owned()[slots]]
        kept = max(self._graph.minimum, self._graph.required())
        return self._graph.num_owned - own.size >= kept and not self._graph.pinned()[own].any()

    def available(self) -> int:
        """Slots that may be taken if nothing is pinned."""
        found = self.pooled()
        return min(found, self._left(found))

    def pooled(self) -> int:
        """Slots of both pools, without those that the graph always keeps."""
        with self._changed:
            spare = max(0, self._graph.num_owned - self._graph.minimum)
            return self._rows.num_owned + spare

    def free(self) -> int:
        """Slots that may be taken at once."""
        with self._changed:
            found = int(self._free_mask().sum())
        return min(found, self._left(found))

    def pinned(self) -> int:
        """Slots of the pools that are pinned at present."""
        with self._changed:
            return int(self._rows.pinned().sum()) + int(self._graph.pinned().sum())

    def row_slots(self, more: int = 0) -> int:
        """Slots that the row pool has at present, at most those that this thread may take.

        more   as if it had so many more
        """
        found = self.pooled_rows() + more
        return min(found, self._left(found))

    def pooled_rows(self) -> int:
        """Slots that the row pool has at present."""
        with self._changed:
            return self._rows.num_owned + self._num_lent()

    def take_run(self, count: int, wait_s: float = WAIT_S, low: bool = False) -> int:
        """Take `count` adjacent slots; returns the first.

        low   the lowest run, for slots that are given back soon: slots taken meanwhile stay at the
              top, and the free ones stay adjacent

        Raises Refused: there is no such run, or batches in flight do not give it back in time.
        """
        if count == 0:
            return 0
        self._check_limit(count)
        with self._changed:
            if _top_run(self._free_mask(pinned=True), count) < 0:  # waiting for batches is no help
                wait_s = min(wait_s, SHORT_WAIT_S)
            if not self._wait_for_slots(lambda: self._try_run(count, low), count, wait_s):
                raise Shortage(self._shortage(count, 0))  # free slots are not adjacent
            self._count(count)
            return self._found

    def take_range(self, slots: range) -> bool:
        """Take these slots if all of them are free now; returns whether they are taken."""
        if len(slots) > self._left(self.num_slots):
            return False
        with self._changed:
            free, index = self._free_mask(), np.arange(slots.start, slots.stop)
            if slots.stop > free.size or not free[index].all():
                return False
            self._remove(index)
            self._count(len(slots))
            return True

    def take(self, count: int) -> list[int]:
        """Take `count` slots, adjacent or not.  Raises Refused as `take_run`."""
        self._check_limit(count)
        with self._changed:
            enough = self._free_mask(pinned=True).sum() >= count
            wait_s = WAIT_S if enough else SHORT_WAIT_S
            if not self._wait_for_slots(lambda: self._free_mask().sum() >= count, count, wait_s):
                raise Shortage(self._shortage(count, int(self._free_mask().sum())))
            chosen = self._remove(np.flatnonzero(self._free_mask())[::-1][:count])
            self._count(count)
            return chosen

    def take_now(self, count: int, spare: int) -> list[int]:
        """Take `count` free slots of the row pool; none if fewer than `spare` would stay free.

        The graph pool keeps its own: sampling would read its blocks again and again.
        """
        self._check_limit(count)
        with self._changed:
            free = np.flatnonzero(self._free_mask() & self._rows.owned())
            if free.size < count + spare:
                return []
            chosen = self._remove(free[free.size - count :])
            self._count(count)
            return chosen

    def give(self, slots: list[int]) -> None:
        self._count(-len(slots))
        with self._changed:
            self._put_back(slots)
            self._changed.notify_all()

    def _wait_for_slots(self, found: Callable[[], bool], count: int, wait_s: float) -> bool:
        """Whether `found` came true in time; while waiting, fewer graph blocks are admitted."""
        if found():
            return True
        self._graph.wanted += count
        try:
            return self._changed.wait_for(found, wait_s)
        finally:
            self._graph.wanted -= count
            self._changed.notify_all()

    def _check_limit(self, count: int) -> None:
        """Raises Refused: more than this thread may take."""
        if count > (left := self._left(count)):
            raise Refused(
                f"{count} arena slots are needed, {left} are left of this user's share; close "
                "another session of this user, or serve with a larger --user-share"
            )

    def _left(self, unlimited: int) -> int:
        """Slots that this thread may still take."""
        return min((limit.left for limit in self._own_limits()), default=unlimited)

    def _count(self, count: int) -> None:
        for limit in self._own_limits():
            limit.left -= count

    def _shortage(self, count: int, useful: int) -> str:
        """`useful`: free slots that would be among the `count`."""
        side_by_side = "" if useful else " side by side"
        return (
            f"needs {count} arena slots{side_by_side}, {int(self._free_mask().sum())} are free, "
            "sessions hold the others: close one, ask for a smaller batch, or serve with at least "
            f"--mem {self._name_mem(count - useful)}"
        )

    def _free_mask(self, pinned: bool = False) -> NDArray[np.bool_]:
        """Mask of the slots that may be taken; `pinned`: including those pinned at present."""
        free, of_graph = self._rows.owned(), self._graph.owned()
        kept = self._graph.minimum
        if not pinned:
            kept = max(kept, self._graph.required())
            free, of_graph = free & ~self._rows.pinned(), of_graph & ~self._graph.pinned()
        graph, spare = np.flatnonzero(of_graph), self._graph.num_owned - kept
        if spare > 0 and graph.size:
            free[graph[-spare:]] = True
        return free

    def _try_run(self, count: int, low: bool) -> bool:
        free = self._free_mask()
        if low:  # rather not the graph's: their blocks would have to be read again
            rows = free & self._rows.owned()
            first = _top_run((rows if _top_run(rows, count) >= 0 else free)[::-1], count)
            self._found = free.size - first - count if first >= 0 else -1
        else:
            self._found = _top_run(free, count)
        if self._found >= 0:
            self._remove(np.arange(self._found, self._found + count))
        return self._found >= 0

    def _remove(self, slots: NDArray[np.int64]) -> list[int]:
        """Take free slots out of the pools: all of them, or none if an error is raised."""
        of_graph, removed = self._graph.owned()[slots], list[int]()
        try:
            for pool, own in ((self._graph, slots[of_graph]), (self._rows, slots[~of_graph])):
                if not pool.remove_slots(own):
                    raise PoolBroken(f"arena slots {own.tolist()} are not free")
                removed += own.tolist()
        except BaseException:
            self._put_back(removed)
            raise
        taken: list[int] = slots.tolist()
        return taken

    def _put_back(self, slots: Sequence[int]) -> None:
        self._graph.add_slots(s for s in slots if self._of_graph[s])
        self._rows.add_slots(s for s in slots if not self._of_graph[s])


def _top_run(free: NDArray[np.bool_], count: int) -> int:
    """First slot of the highest run of `count` free ones; -1: there is none."""
    edges = np.concatenate([[-1], np.flatnonzero(~free), [free.size]])
    gaps = np.flatnonzero(np.diff(edges) - 1 >= count)
    return int(edges[gaps[-1] + 1]) - count if gaps.size else -1
