"""Options, memory plan and estimate of a pack, which rows stay in memory, and groups of batches.

A group is a number of consecutive batches that share rows; each node of a batch has a place in it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall
from blockstore.format import ITEM_BYTES, PAGE_BYTES, Manifest
from blockstore.kernels.order import count_nodes, distinct
from blockstore.store import Store
from blockstore.units import format_bytes, format_mem
from loaderd.api.protocol import Attach, Resolved
from loaderd.api.requests import check_attach
from loaderd.memory.ledger import EngineSettings, edge_record, served_rows, slot_bytes
from loaderd.plans.base import EVERY_RANK
from loaderd.sampling.hyperbatch.regions import TypeRows, rows_by_type
from loaderd.sampling.packed.format import (
    NOWHERE,
    array_dtypes,
    make_record,
    num_pages,
    place_pages,
)
from loaderd.sampling.records import record_dtype
from loaderd.sessions.offline import OfflineSampler
from loaderd.sessions.sizing import resolve_sampled

ABSENT = np.uint32(NOWHERE - 1)  # place of a node whose row neither stays nor is in the group
_PENDING = np.uint32(NOWHERE - 2)  # place of a node whose row will be in the group
_STEP = 1 << 20  # nodes processed together
MAX_WANTS = (1 << 16) - 1  # batches that want a node are counted up to this number
_TRIED = 16  # batches, spread over the first epoch, that are sampled for the estimate
_MIN_BUFFER, _MAX_BUFFER = 64 << 10, 8 << 20
_PARTS = 16  # number of parts of the memory, one of which is for a buffer
_COPIES = 4  # copies of a piece of rows: one being read, others read ahead
_BESIDE = 6  # bytes for each id while a group is built, in addition to the id itself


def count_levels(wants: NDArray[np.uint16], t: TypeRows) -> NDArray[np.int64]:
    """Number of nodes of a type that are wanted by 0, 1, 2, ... batches: int64 (65536,)."""
    levels = np.zeros(1 << 16, np.int64)
    for first in range(t.first, t.first + t.num_nodes, _STEP):
        piece = wants[first : min(first + _STEP, t.first + t.num_nodes)]
        levels += np.bincount(piece, minlength=levels.size)
    return levels


class HotShare(NamedTuple):
    """Which nodes of a type stay: all that more than `level` batches want, and some at `level`.

    These are the first `some` nodes, by id, that exactly `level` batches want.
    """

    level: int
    some: int


def choose_hot(
    levels: Sequence[NDArray[np.int64]], row_bytes: Sequence[int], num_bytes: int
) -> list[HotShare]:
    """Choose the rows that are wanted most often relative to their bytes, up to `num_bytes`.

    Rows that a single batch wants never stay, as they are read once in any case.
    """
    shares = [HotShare((1 << 16) - 1, 0) for _ in levels]
    order = [
        (-level / width, number, int(level))
        for number, (counts, width) in enumerate(zip(levels, row_bytes, strict=True))
        for level in np.flatnonzero(counts)
        if level >= 2
    ]
    for _, number, level in sorted(order):
        count, width = int(levels[number][level]), row_bytes[number]
        taken = min(count, num_bytes // width)
        whole = taken == count
        shares[number] = HotShare(level - 1, 0) if whole else HotShare(level, taken)
        num_bytes -= taken * width
        if not whole:
            break
    return shares


def hot_nodes(wants: NDArray[np.uint16], t: TypeRows, share: HotShare) -> Iterator[NDArray[Any]]:
    """The nodes of a type that stay, ascending, in pieces of int64."""
    some = share.some
    for first in range(t.first, t.first + t.num_nodes, _STEP):
        piece = wants[first : min(first + _STEP, t.first + t.num_nodes)]
        chosen = piece > share.level
        ties = np.flatnonzero(piece == share.level)[:some]
        chosen[ties] = True
        some -= ties.size
        yield np.flatnonzero(chosen) + first


class Group(NamedTuple):
    """Consecutive batches, and the nodes whose rows they share."""

    first: int  # batches [first, stop)
    stop: int
    nodes: NDArray[Any]  # store ids, ascending
    rows: tuple[int, ...]  # number of rows of each type


class Grouping:
    """Divides batches, in order, into groups whose rows take a limited number of bytes."""

    def __init__(
        self, num_nodes: int, types: Sequence[TypeRows], hot: NDArray[Any], group_bytes: int
    ) -> None:
        """Takes 4 bytes a node.

        hot   store ids of the rows that stay, ascending; node hot[i] has place i
        """
        self._types, self._maximum = types, group_bytes
        self._widths = np.array([sum(t.row_bytes) for t in types], np.int64)
        self.place = np.full(num_nodes, NOWHERE, np.uint32)
        for t in types:
            self.place[t.first : t.first + t.num_nodes] = ABSENT
        self.place[hot] = np.arange(hot.size, dtype=np.uint32)
        self._hot = hot.size

    def groups(self, batches: int, nodes_of: Callable[[int], NDArray[Any]]) -> Iterator[Group]:
        """Yield groups; until the next step, `place` holds the places of the group's nodes."""
        listed: list[NDArray[Any]] = []
        first, rows = 0, np.zeros(len(self._types), np.int64)
        for batch in range(batches):
            fresh, more = self._fresh(nodes_of(batch))
            if batch > first and int((rows + more) @ self._widths) > self._maximum:
                yield from self._close(first, batch, listed)
                first, listed, rows = batch, [], np.zeros_like(rows)
                fresh, more = self._fresh(nodes_of(batch))
            self.place[fresh] = _PENDING
            listed.append(fresh)
            rows += more
        yield from self._close(first, batches, listed)

    def _fresh(self, nodes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Nodes that are not in the group yet, ascending, and their number by type."""
        fresh = distinct(nodes[self.place[nodes] == ABSENT])
        return fresh, np.array(self._of_types(fresh), np.int64)

    def _of_types(self, nodes: NDArray[Any]) -> list[int]:
        bounds = [(t.first, t.first + t.num_nodes) for t in self._types]
        found = [np.searchsorted(nodes, np.array(b, np.uint64).astype(nodes.dtype)) for b in bounds]
        return [int(high - low) for low, high in found]

    def _close(self, first: int, stop: int, listed: list[NDArray[Any]]) -> Iterator[Group]:
        nodes = np.sort(np.concatenate(listed))
        self.place[nodes] = np.arange(self._hot, self._hot + nodes.size, dtype=np.uint32)
        yield Group(first, stop, nodes, tuple(self._of_types(nodes)))
        self.place[nodes] = ABSENT


@dataclass(frozen=True)
class PackOptions:
    """What to pack, and its budgets."""

    # the request of one of `world_size` ranks, with plan `auto`, and a split or all nodes as seeds
    request: Attach
    epochs: int
    hot_bytes: int  # bytes of rows that stay in memory
    group_bytes: int  # bytes of the rows of a group of batches; 0: half of `hot_bytes`
    mem_bytes: int
    threads: int

    @property
    def group(self) -> int:
        return self.group_bytes or self.hot_bytes // 2

    def all_ranks(self) -> Attach:
        """The request for the batches of all ranks, as a daemon merges theirs."""
        rank = EVERY_RANK if self.request.world_size > 1 else 0
        return msgspec.structs.replace(self.request, rank=rank)


class PackMemory(NamedTuple):
    """How `--mem` is divided in each stage."""

    buffer: int  # bytes of each of the two buffers of an array being written
    settings: EngineSettings  # of the sampling engine
    scan: int  # bytes of a piece of rows
    blocks: int  # bytes of blocks and ids of the groups that are filled together


@dataclass(frozen=True)
class PackJob:
    """A store, and what to pack of it, with the memory plan."""

    store: Store
    options: PackOptions
    resolved: Resolved
    types: list[TypeRows]
    memory: PackMemory

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of the arrays of a batch's structure."""
        manifest = self.store.manifest
        record = record_dtype(edge_record(manifest, self.resolved))
        return array_dtypes(manifest.id_dtype, record.name)

    @classmethod
    def of(cls, store: Store, options: PackOptions) -> "PackJob":
        """Resolve options for a store.  Raises Refused, BudgetTooSmall."""
        store.check_whole("blockstore pack")
        check_attach(options.request)
        manifest = store.manifest
        resolved = resolve_sampled(manifest, options.request, None)
        types = rows_by_type(served_rows(manifest))
        return cls(store, options, resolved, types, share_memory(manifest, types, options))


def share_memory(manifest: Manifest, types: list[TypeRows], options: PackOptions) -> PackMemory:
    """Divide the memory.  Raises BudgetTooSmall with the minimum of all stages but sampling."""
    mem, nodes, ids = options.mem_bytes, manifest.num_nodes, ITEM_BYTES[manifest.id_dtype]
    block = slot_bytes(manifest)
    buffer = max(_MIN_BUFFER, min(_MAX_BUFFER, mem // _PARTS // 8))
    widths = [sum(t.row_bytes) for t in types] or [1]
    hot, group = (size // min(widths) for size in (options.hot_bytes, options.group))
    scan = max(block, min(2 * _MAX_BUFFER, mem // _PARTS))
    placing = 4 * nodes + (hot + group) * (2 * ids + _BESIDE) + 4 * buffer
    filling = _COPIES * scan + options.threads * (block + group * 2 * ids)
    minimum = max(placing, filling)
    if minimum > mem:
        raise BudgetTooSmall(
            f"--mem {format_bytes(mem)}: places of {nodes:,} nodes and rows of groups take "
            f"{format_bytes(minimum)}; give at least --mem {format_mem(minimum)}, or less --hot "
            "and --group", minimum,
        )  # fmt: skip
    settings = EngineSettings(
        mem, options.threads, max(2, options.threads), reserve_bytes=2 * nodes + 4 * buffer
    )
    return PackMemory(buffer, settings, scan, mem - _COPIES * scan)


class PackEstimate(NamedTuple):
    """The estimated size of a pack, from some batches of its first epoch."""

    batches: int  # of an epoch, of all ranks
    seeds: int  # of an epoch
    nodes: int  # of a batch
    record_bytes: int  # of a batch, with the places of its nodes
    cold_bytes: int  # of a batch, if it shares no rows with others in its group
    batch_bytes: int  # of all rows that a batch wants
    hot_bytes: int
    sample_s: float  # seconds to sample a batch

    @property
    def epoch_bytes(self) -> int:
        """Bytes that a session reads in each epoch; hot rows are read once, in addition."""
        return self.batches * (self.record_bytes + self.cold_bytes)


def estimate_pack(job: PackJob, sampler: OfflineSampler) -> PackEstimate:
    """Sample some batches: 16 over the first epoch, or all."""
    plan, nodes = sampler.plan, job.store.manifest.num_nodes
    every = max(1, plan.num_steps // _TRIED)
    steps = range(0, plan.num_steps, every)[:_TRIED]
    wants, found, records = np.zeros(nodes, np.uint16), [], []
    begun = time.perf_counter()
    for sampled in sampler.batches(0, steps):
        ids = np.concatenate(sampled.arrays.nodes)
        count_nodes(ids, MAX_WANTS, wants)
        found.append(ids)
        record = make_record(sampled.structure, sampled.arrays, job.dtypes)
        size = num_pages(record.num_bytes) + place_pages(ids.size)
        records.append(size * PAGE_BYTES)
    took = (time.perf_counter() - begun) / len(found)
    widths = [sum(t.row_bytes) for t in job.types]
    levels = [count_levels(wants, t) for t in job.types]
    shares = choose_hot(levels, widths, job.options.hot_bytes)
    cold = wanted = hot = 0
    for t, width, share, counts in zip(job.types, widths, shares, levels, strict=True):
        stay = int(counts[share.level + 1 :].sum()) + share.some
        hot += stay * width
        for ids in found:
            own = ids[(ids >= t.first) & (ids < t.first + t.num_nodes)]
            wanted += own.size * width
            # a row would stay if enough of the other batches want it
            cold += int(np.count_nonzero(wants[own] - 1 <= share.level)) * width
    return PackEstimate(
        plan.num_steps, job.resolved.num_seeds, sum(ids.size for ids in found) // len(found),
        sum(records) // len(records), cold // len(found), wanted // len(found), hot, took,
    )  # fmt: skip
