"""Batches of a hyperbatch sampled each by itself, on the engine's workers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from blockstore import concurrency
from loaderd.memory.workspace import Workspace, WorkspaceFull, clear_workspace
from loaderd.plans.base import Shape, Unit
from loaderd.sampling.hyperbatch.compact import compact
from loaderd.sampling.hyperbatch.session import Sampled, StructureArea
from loaderd.sampling.structure import Structure

_MORE = 4  # a small workspace has room for a quarter more than was seen
Built = TypeVar("Built")
Submit = Callable[[Callable[[], None]], None]
Build = Callable[[Unit, Workspace], Structure]  # a batch's structure into a workspace


class Workspaces:
    """Those of a session: taken by whoever builds a batch, and given back.

    A large one holds any batch, a small one what batches usually take.
    """

    def __init__(self) -> None:
        self._spare: dict[bool, concurrency.SimpleQueue[Workspace]] = {  # by whether they are small
            False: concurrency.SimpleQueue(),
            True: concurrency.SimpleQueue(),
        }
        self._total = {False: 0, True: 0}

    @property
    def total(self) -> int:
        return sum(self._total.values())

    def add(self, work: Workspace) -> None:
        self._total[work.small] += 1
        self.give(work)

    def take(self, large: bool = False) -> Workspace:
        """One, as soon as there is one."""
        if large or not self._total[True]:
            return self._spare[False].get()
        return self.try_take() or self._spare[True].get()

    def try_take(self, structure: Structure | None = None) -> Workspace | None:
        """One that holds a batch of this structure, or None where those are in use."""
        for small in (True, False):
            with contextlib.suppress(concurrency.Empty):
                work = self._spare[small].get_nowait()
                if structure is None or _holds(work, structure):
                    return work
                self.give(work)
        return None

    def try_take_large(self) -> Workspace | None:
        """One that holds any batch, or None where those are in use."""
        with contextlib.suppress(concurrency.Empty):
            return self._spare[False].get_nowait()
        return None

    def give(self, work: Workspace) -> None:
        self._spare[work.small].put(work)

    @property
    def all_home(self) -> bool:
        return sum(q.qsize() for q in self._spare.values()) == self.total


def usual_shape(seen: Sequence[Structure], worst: Shape, fanouts: Sequence[Sequence[int]]) -> Shape:
    """Bounds of what batches like those seen take, a quarter more than the largest of them."""

    def more(count: int) -> int:
        return count + count // _MORE + 1

    frontier = tuple(
        min(most, more(max(s.frontiers[hop] for s in seen)))
        for hop, most in enumerate(worst.frontier)
    )
    edges = tuple(
        tuple(
            min(most, max(more(max(s.edges_per_hop[h][r] for s in seen)), frontier[h] * fanout))
            for r, (most, fanout) in enumerate(zip(worst.edges[h], fanouts[h], strict=True))
        )
        for h in range(len(frontier))
    )
    return Shape(
        worst.seeds, frontier, edges, min(worst.nodes, more(max(s.num_nodes for s in seen))),
        worst.ends,
    )  # fmt: skip


def _holds(work: Workspace, structure: Structure) -> bool:
    return not work.small or (
        structure.num_nodes <= work.n_id.size
        and structure.num_edges <= work.local.size
        and structure.num_counts <= work.counts.size
    )


class SessionWorkers:
    """Workers, and the workspaces of a session that they use."""

    def __init__(self, workspaces: Workspaces, submit: Submit, given: Callable[[], None]) -> None:
        """`submit`: to a worker, after what batches wait for.  `given`: a workspace is back."""
        self._workspaces, self._submit, self._given = workspaces, submit, given

    def run(self, count: int, step: Callable[[int, Workspace], bool]) -> None:
        """step(0), step(1), ... in order, several at a time, until one returns False.

        Raises the first error met.  Between two steps a worker does what is more urgent.
        """
        if count == 0:
            return
        work = _Work(count)
        work.active = max(1, min(self._workspaces.total - 1, count))  # one is for handing out
        for _ in range(work.active):
            self._submit(partial(self._step, work, step))
        work.done.wait()
        if work.error is not None:
            raise work.error

    @contextlib.contextmanager
    def large_enough(
        self, work: Workspace, build: Callable[[Workspace], Built]
    ) -> Iterator[tuple[Built, Workspace]]:
        """What `build` makes of a workspace, or of a large one where it is too small."""
        try:
            built = build(work)
        except WorkspaceFull:
            if not work.small:
                raise
        else:
            yield built, work
            return
        large = self._workspaces.take(large=True)
        try:
            yield build(large), large
        finally:
            self._workspaces.give(large)

    def _step(self, work: "_Work", step: Callable[[int, Workspace], bool]) -> None:
        i = work.next()
        if i is None:
            return
        space = self._workspaces.take()
        try:
            work.stop = not step(i, space) or work.stop
        except BaseException as error:
            work.error, work.stop = work.error or error, True
            clear_workspace(space)  # its tables may be half filled
        finally:
            self._workspaces.give(space)
            self._given()
        self._submit(partial(self._step, work, step))


class _Work:
    """What the steps of one run share."""

    def __init__(self, count: int) -> None:
        self.error: BaseException | None = None
        self.stop = False
        self.active = 0
        self.done = concurrency.Event()
        self._count, self._next = count, 0
        self._lock = concurrency.Lock()

    def next(self) -> int | None:
        """The next step; None: this chain of steps ends."""
        with self._lock:
            if self.stop or self._next == self._count:
                self.active -= 1
                if self.active == 0:
                    self.done.set()
                return None
            self._next += 1
            return self._next - 1


class BatchSampler:
    """Where the graph is in memory: nothing is gained by sampling block by block."""

    def __init__(self, build: Build, crew: SessionWorkers) -> None:
        self._build, self._crew = build, crew

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """The first of these batches that the area holds.  Raises what sampling raises."""
        results: list[Sampled | None] = [None] * len(units)

        def step(i: int, work: Workspace) -> bool:
            with self._crew.large_enough(work, lambda w: self._build(units[i], w)) as (found, w):
                results[i] = compact(first + i, units[i], found, w, area)
            return results[i] is not None and not cancelled()

        self._crew.run(len(units), step)
        if results and results[0] is None:  # it came last: those after it had taken all the room
            area.rewind()
            results = [None]
            self._crew.run(1, step)
        found: list[Sampled] = []
        for sampled in results:
            if sampled is None:
                break
            found.append(sampled)
        return found
