"""What packing is asked for, how its memory is shared out, and what some batches say of it."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from blockstore.errors import BudgetTooSmall
from blockstore.format import ITEM_BYTES, PAGE_BYTES, Manifest
from blockstore.kernels.order import count_nodes
from blockstore.store import Store
from blockstore.units import format_bytes, format_mem
from loaderd.api.protocol import Attach, Resolved
from loaderd.api.requests import check_attach
from loaderd.memory.ledger import EngineSettings, make_sizes, served_rows, slot_bytes
from loaderd.plans.base import EVERY_RANK
from loaderd.sampling.hyperbatch.rowcache import TypeRows, rows_by_type
from loaderd.sampling.packed.format import array_dtypes, make_record, num_pages, place_pages
from loaderd.sampling.records import record_dtype
from loaderd.sessions.offline import OfflineSampler
from loaderd.sessions.sizing import resolve_sampled
from preprocess.packs.places import MOST_WANTS, choose_hot, count_levels

_TRIED = 16  # batches, over the first epoch, that a plan is made from
_LEAST_BUFFER, _MOST_BUFFER = 64 << 10, 8 << 20
_PARTS = 16  # of the memory, one of which is a buffer
_COPIES = 4  # of a piece of rows: read, and copied ahead
_BESIDE = 6  # bytes for each id of a group that is put together, over those of the id


@dataclass(frozen=True)
class PackOptions:
    """What is packed, and within what."""

    # of one rank of `world_size`; its plan is `auto`, its seeds are a split, or all nodes
    request: Attach
    epochs: int
    hot_bytes: int  # of rows that stay in memory
    group_bytes: int  # of the rows of a group of batches; 0: half of the hot ones
    mem_bytes: int
    threads: int

    @property
    def group(self) -> int:
        return self.group_bytes or self.hot_bytes // 2

    def all_ranks(self) -> Attach:
        """The request for the batches of all ranks, as a daemon makes it of theirs."""
        rank = EVERY_RANK if self.request.world_size > 1 else 0
        return msgspec.structs.replace(self.request, rank=rank)


class PackMemory(NamedTuple):
    """Bytes of `--mem`, stage by stage."""

    buffer: int  # of each of two buffers of an array that is written
    settings: EngineSettings  # of the engine that samples, beside what stays
    scan: int  # of a piece of rows
    blocks: int  # of the blocks and ids of groups that are filled together


@dataclass(frozen=True)
class PackJob:
    """A store, what is packed of it, and how."""

    store: Store
    options: PackOptions
    resolved: Resolved
    types: list[TypeRows]
    memory: PackMemory

    @property
    def dtypes(self) -> dict[str, str]:
        """Of the arrays of a batch's structure."""
        manifest = self.store.manifest
        sizes = make_sizes(manifest, self.resolved, False)
        return array_dtypes(manifest.id_dtype, record_dtype(sizes.record).name)

    @classmethod
    def of(cls, store: Store, options: PackOptions) -> "PackJob":
        """What options come to for a store.  Raises Refused, BudgetTooSmall."""
        store.check_whole("blockstore pack")
        check_attach(options.request)
        manifest = store.manifest
        resolved = resolve_sampled(manifest, options.request, None)
        types = rows_by_type(served_rows(manifest))
        return cls(store, options, resolved, types, share_memory(manifest, types, options))


def share_memory(manifest: Manifest, types: list[TypeRows], options: PackOptions) -> PackMemory:
    """Raises BudgetTooSmall with what the stages beside sampling need."""
    mem, nodes, ids = options.mem_bytes, manifest.num_nodes, ITEM_BYTES[manifest.id_dtype]
    block = slot_bytes(manifest)
    buffer = max(_LEAST_BUFFER, min(_MOST_BUFFER, mem // _PARTS // 8))
    widths = [sum(t.row_bytes) for t in types] or [1]
    hot, group = (size // min(widths) for size in (options.hot_bytes, options.group))
    scan = max(block, min(2 * _MOST_BUFFER, mem // _PARTS))
    placing = 4 * nodes + (hot + group) * (2 * ids + _BESIDE) + 4 * buffer
    filling = _COPIES * scan + options.threads * (block + group * 2 * ids)
    least = max(placing, filling)
    if least > mem:
        raise BudgetTooSmall(
            f"--mem {format_bytes(mem)}: places of {nodes:,} nodes and rows of groups take "
            f"{format_bytes(least)}; give at least --mem {format_mem(least)}, or less --hot and "
            "--group", least,
        )  # fmt: skip
    settings = EngineSettings(
        mem, options.threads, max(2, options.threads), reserve_bytes=2 * nodes + 4 * buffer
    )
    return PackMemory(buffer, settings, scan, mem - _COPIES * scan)


class PackEstimate(NamedTuple):
    """What a pack will be, by some batches of its first epoch."""

    batches: int  # of an epoch, of all ranks
    seeds: int  # of an epoch
    nodes: int  # of a batch
    record_bytes: int  # of a batch, with the places of its nodes
    cold_bytes: int  # of a batch, if none of its rows are shared by its group
    batch_bytes: int  # of the rows that a batch wants
    hot_bytes: int
    sample_s: float  # for a batch

    @property
    def epoch_bytes(self) -> int:
        """Written once, and read by each epoch of a session; the hot rows come once beside it."""
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
        count_nodes(ids, MOST_WANTS, wants)
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
            # how often the other batches want them says whether they would stay
            cold += int(np.count_nonzero(wants[own] - 1 <= share.level)) * width
    return PackEstimate(
        plan.num_steps, job.resolved.num_seeds, sum(ids.size for ids in found) // len(found),
        sum(records) // len(records), cold // len(found), wanted // len(found), hot, took,
    )  # fmt: skip
