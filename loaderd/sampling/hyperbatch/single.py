"""Batches of a hyperbatch sampled each by itself, on the engine's workers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from blockstore import concurrency
from loaderd.memory.workspace import Workspace, WorkspaceFull, clear_workspace
from loaderd.plans.base import Shape, Unit
from loaderd.sampling.hyperbatch.areas import AreaFull, Sampled, StructureArea
from loaderd.sampling.hyperbatch.compact import compact
from loaderd.sampling.steps import Steps
from loaderd.sampling.structure import Structure

_MORE = 4  # a small workspace has room for a quarter more than was seen
Built = TypeVar("Built")
Submit = Callable[[Callable[[], None]], object]
Build = Callable[[Unit, Workspace], Structure]  # a batch's structure into a workspace


class Workspaces:
    """Workspaces of a session: taken to build a batch, and given back.

    A large one holds any batch, a small one what batches usually take.
    """

    def __init__(self) -> None:
        # by whether they are small
        self._spare: dict[bool, list[Workspace]] = {False: [], True: []}
        self._changed = concurrency.Condition()
        self.total = 0

    def add(self, work: Workspace) -> None:
        self.total += 1
        self.give(work)

    def take(self, large: bool = False) -> Workspace:
        """Take a workspace, as soon as one is free: a small one if possible, unless `large`."""
        kinds = (False,) if large else (True, False)
        with self._changed:
            self._changed.wait_for(lambda: any(self._spare[small] for small in kinds))
            return next(self._spare[small] for small in kinds if self._spare[small]).pop()

    def try_take(self, structure: Structure | None = None) -> Workspace | None:
        """Take one that holds a batch of this structure; None if all of these are in use."""
        with self._changed:
            for spare in (self._spare[True], self._spare[False]):
                if spare and (structure is None or _holds(spare[-1], structure)):
                    return spare.pop()
        return None

    def try_take_large(self) -> Workspace | None:
        """Take one that holds any batch; None if all of these are in use."""
        with self._changed:
            return self._spare[False].pop() if self._spare[False] else None

    def give(self, work: Workspace) -> None:
        with self._changed:
            self._spare[work.small].append(work)
            self._changed.notify_all()

    @property
    def all_home(self) -> bool:
        return sum(map(len, self._spare.values())) == self.total


def usual_shape(
    seen: Sequence[Structure], worst: Shape, fanouts: Sequence[Sequence[int]] | None
) -> Shape:
    """Bounds for batches like those seen: a quarter more than the largest of them.

    fanouts   [hop][relation], if the workspace has room for all draws that a frontier may take;
              None: they are written elsewhere, and it holds only the edges that were found
    """

    def more(count: int) -> int:
        return count + count // _MORE + 1

    frontier = tuple(
        min(maximum, more(max(s.frontiers[hop] for s in seen)))
        for hop, maximum in enumerate(worst.frontier)
    )

    def edges_of(hop: int, relation: int, maximum: int) -> int:
        draws = 0 if fanouts is None else frontier[hop] * fanouts[hop][relation]
        return min(maximum, max(more(max(s.edges_per_hop[hop][relation] for s in seen)), draws))

    edges = tuple(
        tuple(edges_of(hop, relation, maximum) for relation, maximum in enumerate(of_hop))
        for hop, of_hop in enumerate(worst.edges)
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
    """Workers, and the workspaces of a session that they use.

    A worker never waits for a workspace: batches that are handed out hold some until a worker, or
    the client, has done its part.  The thread that asks for steps waits for their workspaces.
    """

    def __init__(self, workspaces: Workspaces, submit: Submit, given: Callable[[], None]) -> None:
        """Use these workspaces.

        submit  gives a worker something to do, after work that batches wait for
        given   called when a workspace is back
        """
        self._workspaces, self._submit, self._given = workspaces, submit, given
        self._held: Workspace | None = None  # see `holding`
        self._alone = False  # all steps are done in it, one after another

    def run(self, count: int, step: Callable[[int, Workspace], bool]) -> None:
        """Run step(0), step(1), ... in order, several at a time, until one returns False.

        Raises the first error met.  Between two steps a worker does more urgent work.
        """
        if count == 0:
            return
        own = self._held or self._workspaces.take()
        chains = 1 if self._alone else min(self._workspaces.total, count)
        steps = Steps(count, chains)
        try:
            for space in [own, *[None] * (chains - 1)]:
                self._submit(partial(self._step, steps, step, space))
            steps.wait_all()
        finally:
            if self._held is None:
                self._give(own)

    @contextlib.contextmanager
    def holding(self, large: bool = False) -> Iterator[None]:
        """Inside, `run` does not wait for a workspace; the caller waits here until there is one.

        large   a large one, in which all steps are done
        """
        held, self._alone = self._workspaces.take(large), large
        self._held = held
        try:
            yield
        finally:
            self._held, self._alone = None, False
            self._give(held)

    @contextlib.contextmanager
    def large_enough(
        self, work: Workspace, build: Callable[[Workspace], Built]
    ) -> Iterator[tuple[Built, Workspace]]:
        """Build in a workspace, or in a large one if it is too small; gives (built, workspace).

        Raises AreaFull: all large ones are in use; see `holding`.
        """
        try:
            built = build(work)
        except WorkspaceFull:
            if not work.small:
                raise
        else:
            yield built, work
            return
        if (large := self._workspaces.try_take_large()) is None:
            raise AreaFull
        try:
            yield build(large), large
        finally:
            self._workspaces.give(large)

    def _give(self, work: Workspace) -> None:
        self._workspaces.give(work)
        self._given()

    def _step(
        self, steps: Steps, step: Callable[[int, Workspace], bool], own: Workspace | None
    ) -> None:
        """Do a step in `own`, or in a free workspace; without one this chain of steps ends."""
        space = own or self._workspaces.try_take()
        i = None if space is None else steps.take()
        if space is None or i is None:
            if space is not None and own is None:
                self._give(space)
            steps.leave()
            return
        more, failed = False, None
        try:
            more = step(i, space)
        except BaseException as error:
            failed = error
            clear_workspace(space)  # its tables may be half filled
        finally:
            if own is None:
                self._give(space)
        steps.done(i, more, failed)
        self._submit(partial(self._step, steps, step, own))


class BatchSampler:
    """Samples batches one by one if the graph is in memory: going by blocks would gain nothing."""

    def __init__(self, build: Build, workers: SessionWorkers) -> None:
        self._build, self._workers = build, workers

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """Sample as many of the first units as the area holds.  Raises what sampling raises."""
        results: list[Sampled | None] = [None] * len(units)

        def step(i: int, work: Workspace) -> bool:
            try:
                with self._workers.large_enough(work, lambda w: self._build(units[i], w)) as built:
                    results[i] = compact(first + i, units[i], built[0], built[1], area)
            except AreaFull:
                return False
            return results[i] is not None and not cancelled()

        self._workers.run(len(units), step)
        # the first one was done last, when others had all the room; or large ones were in use
        if results and results[0] is None and not cancelled():
            area.rewind()
            results = [None]
            with self._workers.holding(large=True):
                self._workers.run(1, step)
        found: list[Sampled] = []
        for sampled in results:
            if sampled is None:
                break
            found.append(sampled)
        return found
