"""Plan `macrobatch`: neighbor sampling inside some partitions at a time (HANOI).

An epoch deals the partitions out into macro-batches, each partition into one.  A macro-batch's
seeds are those in its partitions; it is divided into steps of nearly equal size.  Their number is
enough for any epoch: every epoch has as many steps, and no step has more seeds than a batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.order import group_by_range
from blockstore.kernels.random import make_key, permute_range
from loaderd.api.errors import Refused
from loaderd.api.protocol import Resolved
from loaderd.plans.base import EVERY_RANK, Part, Unit, drawn_epoch
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from loaderd.plans.roots import Roots, node_roots

_PARTITIONS, _SEEDS = 1 << 62, 3 << 61  # in place of a step in keys: no draw has them

_KEPT = 4  # epoch layouts that are cached


class Epoch(NamedTuple):
    """How an epoch's steps are distributed over macro-batches."""

    members: tuple[NDArray[np.int64], ...]  # partitions of each macro-batch, ascending
    seeds: NDArray[np.int64]  # (macro-batches,)
    steps: NDArray[np.int64]  # (macro-batches,) in one pass over its seeds; or (rounds,)
    first_step: NDArray[np.int64]  # (macro-batches + 1,) all passes counted; or (rounds + 1,)


class MacrobatchPlan(MinibatchPlan):
    """Every seed comes `reuse` times an epoch, each time with others of its macro-batch."""

    name = "macrobatch"

    def __init__(
        self,
        resolved: Resolved,
        part: Part,
        bounds: GraphBounds,
        seeds_in: NDArray[np.int64] | None = None,
    ) -> None:
        """`seeds_in`: int64 (partitions,), seeds in each; without them there are no steps yet.

        Raises Refused: fewer seeds than ranks, or than steps need.
        """
        super().__init__(resolved, part, bounds)
        assert resolved.macro is not None
        self._macro = resolved.macro
        self._steps = 0 if seeds_in is None else self._count_steps(seeds_in)
        self._num_steps = self._count_sampled()
        self._seeds_in = seeds_in
        self._layouts = dict[int, Epoch]()  # of some epochs; replaced, never modified

    def placed(self, seeds_in: NDArray[np.int64]) -> Self:
        """The plan, once it is known how many seeds are in each partition."""
        return type(self)(self.resolved, self.part, self._bounds, seeds_in)

    @property
    def num_macros(self) -> int:
        return -(-self._macro.num_partitions // self._macro.partitions)

    def epoch_layout(self, epoch: int) -> Epoch:
        found = self._layouts.get(epoch)
        if found is None:
            found = self._lay_out(epoch)
            kept = list(self._layouts.items())[1 - _KEPT :]
            self._layouts = dict([*kept, (epoch, found)])
        return found

    def unit(self, epoch: int, step: int) -> Unit:
        """This part's share of a step: positions among the seeds of its macro-batch.

        If the plan is for every rank, `step` is a position, `step * world + rank`.
        """
        layout = self.epoch_layout(epoch)
        position, rank, world = step, self.part.rank, self.part.world_size
        if rank == EVERY_RANK:
            step, rank = divmod(position, world)
        macro = int(np.searchsorted(layout.first_step, step, "right")) - 1
        cycle, i = divmod(step - int(layout.first_step[macro]), int(layout.steps[macro]))
        seeds, steps = int(layout.seeds[macro]), int(layout.steps[macro])
        start, stop = seeds * i // steps, seeds * (i + 1) // steps
        size = stop - start
        return Unit(
            epoch, position, start + size * rank // world, start + size * (rank + 1) // world,
            macro, cycle,
        )  # fmt: skip

    def order(self, unit: Unit, out: NDArray[np.int64]) -> None:
        """out[i] = place, among the seeds of the unit's macro-batch, of its seed i."""
        layout = self.epoch_layout(unit.epoch)
        if not self.resolved.shuffle:
            out[:] = np.arange(unit.start, unit.stop)
            return
        epoch = drawn_epoch(self.resolved, unit.epoch)
        key = make_key(self.resolved.seed, epoch, _SEEDS, unit.macro, unit.cycle)
        size = int(layout.seeds[unit.macro])
        permute_range(unit.start, unit.stop, size, np.uint64(key), out)

    def _count_sampled(self) -> int:
        """Batches that are sampled in an epoch."""
        return self._steps * self._macro.reuse

    def _count_steps(self, seeds_in: NDArray[np.int64]) -> int:
        """Steps of a pass, enough for every deal of partitions."""
        world, total = self.part.world_size, int(seeds_in.sum())
        maximum = min(self.num_macros, int(np.count_nonzero(seeds_in)))  # macro-batches with seeds
        steps = -(-total // self.resolved.batch_size) + maximum - 1
        if world == 1:
            return min(steps, total)
        minimum = np.sort(seeds_in)[: self._macro.partitions]
        fewest = int(minimum.sum()) or int(seeds_in[seeds_in > 0].min())
        if fewest < world or total // world - maximum + 1 < steps:
            raise Refused(
                f"macro-batches of {self._macro.partitions} partitions may hold as few as {fewest} "
                f"of {total} seeds, too few for {steps} steps of {world} ranks: ask for a larger "
                "batch_size or for more partitions a macro-batch"
            )
        return steps

    def _cuts(self) -> Sequence[int]:
        """Places in the order of the partitions where macro-batches after the first begin."""
        return range(self._macro.partitions, self._macro.num_partitions, self._macro.partitions)

    def _share_steps(self, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Steps of each macro-batch, in one pass over its seeds."""
        return share_steps(seeds, self._steps, self.resolved.batch_size, self.part.world_size)

    def _lay_out(self, epoch: int) -> Epoch:
        resolved, order = self.resolved, np.arange(self._macro.num_partitions)
        seeds_in = self._seeds_in
        assert seeds_in is not None
        if resolved.shuffle:
            key = make_key(resolved.seed, drawn_epoch(resolved, epoch), _PARTITIONS, 0, 0)
            permute_range(0, order.size, order.size, np.uint64(key), order)
        members = tuple(np.sort(m) for m in np.split(order, self._cuts()))
        seeds = np.array([seeds_in[m].sum() for m in members], np.int64)
        steps = self._share_steps(seeds)
        first = np.concatenate([[0], np.cumsum(steps * self._macro.reuse)])
        return Epoch(members, seeds, steps, first)


def share_steps(
    seeds: NDArray[np.int64], total: int, batch_size: int, world_size: int
) -> NDArray[np.int64]:
    """Divide `total` steps among macro-batches: no step has more seeds than a batch.

    Steps left over go where steps are largest; ties to the first.  Without seeds there are none.
    """
    steps = -(-seeds // batch_size)
    maximum = seeds // world_size
    steps = np.minimum(steps, maximum)
    for _ in range(total - int(steps.sum())):
        size = np.where(steps < maximum, seeds / np.maximum(steps, 1), -1.0)
        steps[int(np.argmax(size))] += 1
    return steps


class SeedGroups:
    """A session's seeds, partition by partition."""

    def __init__(
        self, seeds: NDArray[Any], offsets: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Group the seeds' places; takes 8 bytes a seed meanwhile.

        seeds    id_dtype (num_seeds,)      store ids
        offsets  int64 (partitions + 1,)    first node of each partition, then the end
        places   int64 (num_seeds,)         out: places of the seeds, partition by partition
        """
        self._starts = np.empty(offsets.size, np.int64)
        group_by_range(seeds, offsets, self._starts, places)
        self._places = places
        self.counts = np.diff(self._starts)  # int64 (partitions,)

    def roots(self, plan: MacrobatchPlan, unit: Unit, seeds: NDArray[Any]) -> Roots:
        """The roots of a unit's batch; `seeds`: of the session."""
        out = np.empty(unit.num_seeds, np.int64)
        plan.order(unit, out)
        members = plan.epoch_layout(unit.epoch).members[unit.macro]
        ends = np.cumsum(self.counts[members])
        group = np.searchsorted(ends, out, "right")
        inside = out - np.concatenate([[0], ends])[group]
        return node_roots(seeds, self._places[self._starts[members[group]] + inside])
