"""Datasets that read, and move to the device, several steps at a time."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, Unpack

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.utils.data import get_worker_info

from clients.batch import BatchReader
from clients.connection.position import Position, StateMismatch
from clients.connection.request import fanouts_of_hops
from clients.connection.session import Session
from clients.dataset import Connection, ReadStep, gather_threads
from clients.large.batch import (
    LargeBatch,
    OwnBatches,
    PartitionDraws,
    SharedDraws,
    boundary_reads,
    fused_batches,
)
from clients.large.reader import NewRowsReader, PartReader
from clients.large.steps import LargeSteps, PartitionSteps
from clients.torch import Batch, Fanouts, NodeSampledDataset, SeededOptions, only_type
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Attached
from loaderd.plans.base import Part
from loaderd.plans.minibatch import GraphBounds
from loaderd.plans.partitions import PartitionPlan

DRAWS = ("own", "shared", "partitions")
PLANS = ("auto", "minibatch", "hyperbatch")
_STATE = "large"  # in the state of a dataset with shared draws


class LargeDataset(NodeSampledDataset[Batch]):
    """Batches of a store of one node type and one relation, read a large batch at a time.

    A large batch covers `large_batches` steps, whose rows are transferred once.  Iterating yields
    the batch of each step, as in `NeighborDataset`; with `Prefetcher` it is cut out of the large
    batch on the device.  Steps, states and epochs count batches.
    """

    batch_type, several_types = Batch, "clients.torch.HeteroDataset"
    rows_by_device = False  # several messages make up one transfer to a device

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        num_neighbors: Fanouts = (15, 10, 5),
        batch_size: int = 1000,
        *,
        draws: Literal["own", "shared", "partitions"] = "own",
        large_batches: int = 0,
        second_fanout: Sequence[int] = (),
        **options: Unpack[SeededOptions],
    ) -> None:
        """As `NeighborDataset`, for one node type and relation, without times.

        draws          "own": the batches of `NeighborDataset`, bit for bit.  "shared": the steps of
                       a large batch share their draws, so the daemon samples them once; needs
                       frontier="layer".  "partitions": likewise, but a large batch has all seeds of
                       `macro_partitions` partitions (each rank has others), and only nodes of these
                       partitions are expanded; all other nodes are for historical embeddings
                       (`clients.large.history`)
        large_batches  steps of a large batch; 0: a twelfth of an epoch's.  With own draws it
                       changes no batch
        second_fanout  with shared draws: how many draws each step keeps per node, by hop, -1: all
        """
        super().__init__(endpoint, split, num_neighbors, batch_size, **options)
        self.fused = False  # whether batches are handed out as `FusedBatch`
        self.current: LargeBatch | None = None  # that the newest batch was cut out of
        self._draws, self._steps_asked = draws, large_batches
        self._layout: LargeSteps | PartitionSteps | None = None  # of the epoch being read
        self._second_fanout = fanouts_of_hops(second_fanout, "second_fanout")
        self._refuse()

    def _refuse(self) -> None:
        """Raises Refused: options that do not go together."""
        asked, draws = self._request, self._draws
        if draws not in DRAWS:
            raise Refused(f"draws {draws!r}: expected {' or '.join(map(repr, DRAWS))}")
        if not isinstance(self._steps_asked, int) or self._steps_asked < 0:
            raise Refused(
                f"large_batches: found {self._steps_asked!r}, expected a number of steps, or 0 for "
                "a twelfth of an epoch"
            )
        if asked.plan not in PLANS:
            expected = " or ".join(map(repr, PLANS))
            raise Refused(f"large batches: found plan {asked.plan!r}, expected {expected}")
        if asked.edge_features:
            raise Refused("large batches: found edge_features, expected rows of nodes alone")
        if draws == "partitions" and self._steps_asked:
            raise Refused(
                f"large_batches: found {self._steps_asked} with draws 'partitions', whose large "
                "batches are partitions, expected 0; give macro_partitions"
            )
        if draws != "own" and asked.frontier != "layer":
            raise Refused(
                f"draws {draws!r}: found frontier {asked.frontier!r}, in which the draws of a seed "
                "depend on the others, expected frontier='layer'"
            )
        if not self._second_fanout:
            return
        hops = len(asked.num_neighbors) or max(map(len, asked.fanouts.values()), default=0)
        if draws != "shared":
            raise Refused(f"second_fanout: found draws {draws!r}, expected 'shared'")
        if len(self._second_fanout) != hops or min(self._second_fanout) < -1:
            raise Refused(
                f"second_fanout: found {list(self._second_fanout)}, expected a fanout for each of "
                f"{hops} hops"
            )

    # -- large batches -----------------------------------------------------------------------------

    def _partition_plan(self, attached: Attached) -> PartitionPlan:
        """The same plan as the daemon's."""
        asked, dealt = self._request, attached.partitions
        assert dealt is not None
        part, bounds = Part(asked.rank, asked.world_size), GraphBounds(dealt.first[-1], ())
        return PartitionPlan(attached.resolved, part, bounds, np.array(dealt.seeds, np.int64))

    def _steps_of(self, attached: Attached, epoch: int) -> LargeSteps | PartitionSteps:
        """The division of an epoch's steps into large batches."""
        if self._draws == "partitions":
            return PartitionSteps.of_epoch(self._partition_plan(attached), epoch)
        return self._equal_steps(attached)

    def _equal_steps(self, attached: Attached) -> LargeSteps:
        asked, num_seeds = self._request, attached.resolved.num_seeds
        epoch = LargeSteps(num_seeds, asked.batch_size, asked.world_size, self._steps_asked)
        return epoch if self._steps_asked else epoch.with_default()

    def _asked(self) -> Attach:
        """The request; with shared draws, for large batches, which all ranks read in full."""
        if self._draws == "own":
            return self._request
        if self._draws == "partitions":
            return structs.replace(self._request, plan=PartitionPlan.name)
        if not self._steps_asked:  # the daemon knows how many seeds there are
            found = self._ask(structs.replace(self._request, window=1))
            self._steps_asked = self._equal_steps(found).steps
        size = self._steps_asked * self._request.batch_size
        return structs.replace(self._request, batch_size=size, rank=0, world_size=1)

    def _count_steps(self, attached: Attached) -> int:
        if self._draws == "partitions":
            return self._partition_plan(attached).trained_steps
        return self._equal_steps(attached).num_steps

    def _make_reader(self, session: Session) -> BatchReader:
        self._refuse_types(session)
        threads = gather_threads()
        if self._draws == "own":
            return NewRowsReader(session, self.memory, threads)
        steps = self._equal_steps(session.attached)
        if self._draws == "partitions" or steps.world_size == 1:
            return BatchReader(session, self.memory, threads)
        if steps.leaves_tail:
            raise Refused(
                f"{self.endpoint}: {steps.num_seeds} seeds in large batches of {steps.steps} steps "
                f"leave fewer to the last one than the {steps.world_size} ranks; take "
                f"large_batches {steps.without_tail().steps}"
            )
        return PartReader(session, self.memory, threads)

    def _read_step(self, connection: Connection, step: int) -> LargeBatch:
        """The large batch of a step, with this step and those that follow in it."""
        reader, attached = connection.reader, connection.session.attached
        assert self._layout is not None
        steps = self._layout.of(step)
        if isinstance(reader, NewRowsReader):
            reader.begin()
            batches = [Batch(**only_type(reader.read(s))) for s in steps]
            return OwnBatches(batches, reader.places)
        large = self._layout.large(step)
        shares = [self._layout.seeds(s, self._request.rank) for s in steps]
        store_id: dict[str, Tensor] = {}
        if isinstance(reader, PartReader):
            seeds = np.concatenate([np.arange(s.start, s.stop) for s in shares])
            whole = reader.read_part(large, seeds)
            ends = accumulate((len(s) for s in shares), initial=0)
            shares = [range(*span) for span in pairwise(ends)]
        else:
            found = reader.read(large)
            store_id = found.pop("store_id", store_id)
            whole = Batch(**only_type(found))
        cuts = [(s.start, s.stop) for s in shares]
        shared = (whole, step, cuts, self._second_fanout, attached.resolved.seed)
        if self._draws == "shared":
            return SharedDraws(*shared)
        plan, dealt = self._partition_plan(attached), attached.partitions
        assert dealt is not None
        unit = plan.unit(whole.epoch, whole.step)
        ranges = plan.inner_ranges(unit.epoch, unit.macro, np.array(dealt.first))
        (stored,) = store_id.values()
        # an id lies inside a range if the number of bounds up to it is odd
        inner = torch.from_numpy(np.searchsorted(ranges, stored.numpy(), "right") % 2 == 1)
        return PartitionDraws(*shared, stored, inner, boundary_reads(whole, inner))

    # -- steps of them -----------------------------------------------------------------------------

    def ahead(self) -> Iterator[ReadStep]:
        info = get_worker_info()
        if info is not None:
            raise Refused(
                f"large batches: found a DataLoader with {info.num_workers} workers, expected "
                "none; clients.torch.Prefetcher reads ahead in a thread"
            )
        return super().ahead()

    def first_large_batch(self) -> LargeBatch:
        """Read the large batch of the next epoch's first steps, without consuming a step."""
        read = next(self.ahead()).batch
        assert isinstance(read, LargeBatch)
        return read

    def _reads(self, epoch: int, steps: range) -> Iterable[int]:
        layout, step = self._steps_of(self.attached(), epoch), steps.start
        while step < steps.stop:
            yield step
            step = layout.of(step).stop

    def _start(self, session: Session, at: Position) -> None:
        self._layout = self._steps_of(session.attached, at.epoch)
        if self._draws != "own":
            at = at._replace(step=self._layout.large(at.step))
        super()._start(session, at)

    def hand_out(self, step: ReadStep, read: Any) -> Iterator[Batch]:
        if not isinstance(read, LargeBatch) or step.position is None:
            yield from super().hand_out(step, read)
            return
        self.current = read
        for batch in fused_batches(read) if self.fused else read.batches():
            self.consume(step._replace(position=step.position._replace(step=batch.step)))
            yield batch

    # -- states ------------------------------------------------------------------------------------

    def state_dict(self, batch: Any = None) -> dict[str, Any]:
        """As in `SteppedDataset`; with own draws it fits `NeighborDataset`, too, and vice versa."""
        state = super().state_dict(batch)
        if self._draws != "shared":
            return state
        # without a step other datasets refuse the state: it would count larger batches there
        step = state.pop("step")
        return state | {_STATE: {"step": step, "large_batches": self._steps_asked, **self._fixed()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        large = state.get(_STATE, {})
        if self._draws == "shared" and large:
            steps = self._steps_asked or large.get("large_batches")
            expected = {"large_batches": steps, **self._fixed()}
            found = {name: large.get(name) for name in expected}
            if found != expected:
                raise StateMismatch(f"state was saved with {found} (now {expected})")
            self._steps_asked = int(steps)
            state = {**state, "step": large.get("step")}
        elif self._draws == "shared":
            raise StateMismatch("state was saved with own draws (now with shared draws)")
        elif large:
            raise StateMismatch("state was saved with shared draws (now with own draws)")
        super().load_state_dict(state)

    def _fixed(self) -> dict[str, Any]:
        """Options that determine batches, but are unknown to the daemon."""
        asked = self._request.batch_size
        return {"batch_size": asked, "second_fanout": list(self._second_fanout)}
