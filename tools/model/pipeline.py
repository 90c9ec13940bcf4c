"""Seconds of an epoch, from the work of each thread and how their stages overlap.

An epoch passes through its stages in groups of batches: while one group is handed out, the rows of
the next are loaded and the one after that is sampled (for threads, see docs/architecture.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tools.model.graph import Counts


class BusyTime(NamedTuple):
    """Seconds of an epoch by what spends them; CPU seconds, except for disks and network."""

    sample: float = 0.0  # workers: structure, addresses
    passing: float = 0.0  # workers: copies of rows that do not stay, with plain minibatches
    note: float = 0.0  # the gather thread: check which rows of hyperbatches are present
    bring: float = 0.0  # the gather or macro-batch thread: loading, without reads
    read: float = 0.0  # readers
    client: float = 0.0  # the trainer's thread that copies batches
    helpers: float = 0.0  # other threads of the trainer
    disk: float = 0.0
    graph_disk: float = 0.0  # part of `disk`, for blocks of the graph
    network: float = 0.0

    @property
    def cpu(self) -> float:
        return sum(self[: BusyTime._fields.index("disk")])

    def busy(self, cores: int) -> dict[str, float]:
        """Seconds of work of each resource that others may have to wait for."""
        return {
            "disk": self.disk, "network": self.network, "cores": self.cpu / cores,
            "gather": self.note + self.bring, "client": self.client,
        }  # fmt: skip


class GroupStage(NamedTuple):
    """A stage of a pipeline: seconds for each group of batches."""

    alone: Counts  # (groups,) if it ran alone
    cpu: Counts  # (groups,) CPU seconds, on all cores
    disk: Counts  # (groups,)


def pipeline_s(stages: Sequence[GroupStage], cores: int) -> float:
    """Seconds until the last group has passed through all stages.

    In each period every stage works on a group, the first stage on the latest one.  Stages share
    cores and disk; a period takes as long as the busiest of these.
    """

    def in_periods(field: str) -> Counts:
        after = len(stages) - 1
        found: Counts = np.stack(
            [np.pad(getattr(s, field), (i, after - i)) for i, s in enumerate(stages)]
        )
        return found

    busiest = np.maximum(in_periods("cpu").sum(0) / cores, in_periods("disk").sum(0))
    return float(np.maximum(in_periods("alone").max(0), busiest).sum())


def batch_stages(work: BusyTime, steps: int, workers: int) -> list[GroupStage]:
    """Minibatches, and chunks: each worker builds one batch after another, and does its reads."""
    each = np.full(steps, 1 / steps)
    cpu = work.sample + work.passing
    built = max(work.disk, (cpu + work.disk) / workers)
    return [
        GroupStage(each * built, each * (cpu + work.read), each * work.disk),
        _handed_out(work, each),
    ]


def macro_stages(work: BusyTime, groups: int, workers: int) -> list[GroupStage]:
    """One macro-batch is read while batches come from another, also across epochs."""
    each = np.full(groups, 1 / groups)
    alone = max(work.disk, work.bring, work.sample / workers, work.client)
    return [GroupStage(each * alone, each * work.cpu, each * work.disk)]


def hyper_stages(
    work: BusyTime, groups: Sequence[int], hops: int, workers: int
) -> list[GroupStage]:
    """Hyperbatches are sampled by workers, their rows are loaded by one thread, then handed out.

    groups   batches of each hyperbatch
    """
    each = np.array(groups) / sum(groups)
    # each takes one pass over blocks of the graph, but the first takes one for each hop
    passes = np.ones(len(groups))
    passes[0] = hops
    passes /= passes.sum()
    graph, rows = passes * work.graph_disk, each * (work.disk - work.graph_disk)
    read = work.read / max(work.disk, 1e-12)  # CPU seconds per second of the disk
    brought = each * work.note + np.maximum(rows, each * max(work.bring, work.network))
    return [
        GroupStage(np.maximum(each * work.sample / workers, graph),
                   each * work.sample + graph * read, graph),
        GroupStage(brought, each * (work.note + work.bring) + rows * read, rows),
        _handed_out(work, each),
    ]  # fmt: skip


def _handed_out(work: BusyTime, each: Counts) -> GroupStage:
    return GroupStage(each * work.client, each * (work.client + work.helpers), np.zeros_like(each))
