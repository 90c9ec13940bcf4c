"""Batches of a hyperbatch sampled each by itself, on the engine's workers."""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from loaderd.hyper import Sampled, StructureArea
from loaderd.plans.base import Unit
from loaderd.topology import Structure
from loaderd.workspace import Workspace

Submit = Callable[[Callable[[], None]], None]
Build = Callable[[Unit, Workspace], Structure]  # a batch's structure into a workspace


class Workspaces:
    """Those of a session: taken by whoever builds a batch, and given back."""

    def __init__(self) -> None:
        self._spare: queue.SimpleQueue[Workspace] = queue.SimpleQueue()
        self.total = 0

    def add(self, work: Workspace) -> None:
        """One more."""
        self.total += 1
        self._spare.put(work)

    def take(self) -> Workspace:
        """One, as soon as there is one."""
        return self._spare.get()

    def try_take(self) -> Workspace | None:
        """One, or None where all are in use."""
        try:
            return self._spare.get_nowait()
        except queue.Empty:
            return None

    def give(self, work: Workspace) -> None:
        """Back."""
        self._spare.put(work)

    @property
    def all_home(self) -> bool:
        """Whether nobody has one."""
        return self._spare.qsize() == self.total


def compact(
    batch: int, unit: Unit, structure: Structure, work: Workspace, area: StructureArea
) -> Sampled | None:
    """What stands in a workspace after sampling, copied to the area; None where it has no room."""
    used = _num_counts(structure)
    edges = structure.num_edges if work.edge_ids.size else 0
    parts: list[NDArray[Any]] = []
    for values in (
        work.n_id[: structure.num_nodes],
        work.counts[:used],
        work.local[: structure.num_edges],
        work.edge_ids[:edges],
    ):
        copied = area.copy(values)
        if copied is None:
            return None
        parts.append(copied)
    return Sampled(batch, unit, structure, parts[0], parts[1], parts[2], parts[3], area)


def expand(sampled: Sampled, work: Workspace) -> None:
    """The other way round."""
    work.n_id[: sampled.nodes.size] = sampled.nodes
    work.counts[: sampled.counts.size] = sampled.counts
    work.local[: sampled.local.size] = sampled.local
    work.edge_ids[: sampled.edge_ids.size] = sampled.edge_ids


def _num_counts(structure: Structure) -> int:
    """Entries of `counts`: one a frontier node and relation, of all hops."""
    hops = zip(structure.frontiers, structure.edges_per_hop, strict=True)
    return sum(frontier * len(edges) for frontier, edges in hops)


class BatchSampler:
    """Where the graph is in memory: nothing is gained by sampling block by block."""

    def __init__(
        self, build: Build, workspaces: Workspaces, submit: Submit, given: Callable[[], None]
    ) -> None:
        """`submit`: to a worker, after what batches wait for.  `given`: a workspace is back."""
        self._build, self._workspaces = build, workspaces
        self._submit, self._given = submit, given

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """The first of these batches that the area holds.  Raises what sampling raises."""
        work = _Work(len(units), cancelled)
        width = max(1, min(self._workspaces.total - 1, len(units)))  # one is for handing out
        work.active = width
        for _ in range(width):
            self._submit(partial(self._step, work, units, first, area))
        work.done.wait()
        if work.error is not None:
            raise work.error
        found: list[Sampled] = []
        for sampled in work.results:
            if sampled is None:
                break
            found.append(sampled)
        return found

    def _step(self, work: "_Work", units: Sequence[Unit], first: int, area: StructureArea) -> None:
        """One batch, then the next one is submitted: what waits for a worker gets its turn."""
        i = work.next()
        if i is None:
            return
        space = self._workspaces.take()
        try:
            structure = self._build(units[i], space)
            work.results[i] = compact(first + i, units[i], structure, space, area)
            work.stop = work.stop or work.results[i] is None
        except BaseException as error:
            work.error, work.stop = work.error or error, True
        finally:
            self._workspaces.give(space)
            self._given()
        self._submit(partial(self._step, work, units, first, area))


class _Work:
    """What the steps of one hyperbatch share."""

    def __init__(self, count: int, cancelled: Callable[[], bool]) -> None:
        self.results: list[Sampled | None] = [None] * count
        self.error: BaseException | None = None
        self.stop = False
        self.active = 0
        self.done = threading.Event()
        self._cancelled, self._next = cancelled, 0
        self._lock = threading.Lock()

    def next(self) -> int | None:
        """The next batch; None: this chain of steps ends."""
        with self._lock:
            if self.stop or self._next == len(self.results) or self._cancelled():
                self.active -= 1
                if self.active == 0:
                    self.done.set()
                return None
            self._next += 1
            return self._next - 1
