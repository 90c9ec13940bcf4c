"""How a session's share of the arena is cut for hyperbatches.  Pure."""

from typing import NamedTuple

from blockstore.format import ITEM_BYTES, PAGE_BYTES
from loaderd.memory.ledger import SessionNeed
from loaderd.monitoring.devicecost import RUN_BYTES
from loaderd.plans.hyperbatch import choose_size, grown
from loaderd.sampling.hyperbatch.rowcache import (
    area_slots_of,
    entry_bytes,
    rows_by_type,
    share_entries,
    table_bytes,
)
from loaderd.sampling.rows import ServedFiles

_SLACK = 8  # an area has room for an eighth more than was counted
_CHUNKS = 4  # areas that hold a hyperbatch; two more are sampled into meanwhile
_LEAST_BATCHES = 2  # whose rows a cache must hold to be of use


class Estimate(NamedTuple):
    """An epoch, by what its first minibatches took."""

    num_steps: int  # minibatches of the epoch
    structure_bytes: int  # of one, compact
    nodes: int  # of one
    scratch_bytes: int  # of one while its widest hop is sampled; 0: the graph is in memory
    least_scratch: int  # of the worst there may be
    rows: tuple[int, ...]  # different nodes of the first 1, 2, 4, ...


class HyperSizing(NamedTuple):
    """Slots, unless said otherwise."""

    size: int  # minibatches of a hyperbatch
    chunk: int  # of these, sampled into one area
    areas: int
    area: int  # contiguous, each
    scratch: int  # contiguous
    tables: int  # contiguous
    entries: tuple[int, ...]  # rows, per node type; empty: no cache
    rows: int  # for the entries' rows
    run: int  # contiguous, of each transit buffer
    quota: int

    def slots(self, readers: int) -> int:
        return (
            self.areas * self.area
            + self.scratch
            + self.tables
            + self.rows
            + self.run * readers
            + self.quota
        )


def cut_hyper(
    room: int,
    files: ServedFiles,
    need: SessionNeed,
    estimate: Estimate,
    readers: int,
    window: int,
    asked: int,
) -> HyperSizing | None:
    """Cut `room` slots; None where they do not hold the least.

    asked   minibatches of a hyperbatch that the client wants, 0: as many as have room
    """
    slot_bytes, id_dtype, item = files.slot_bytes, files.id_dtype, ITEM_BYTES[files.id_dtype]
    types, most = rows_by_type(files.served), asked or estimate.num_steps
    each = sum(sum(t.row_bytes) for t in types) + entry_bytes(item)
    addresses = estimate.nodes * 8 * len(files.served)
    batch = -(-estimate.structure_bytes // slot_bytes) + -(-addresses // slot_bytes) + 1
    quota = max(need.least_quota, min(window * batch, room // 4))
    run = -(-max(RUN_BYTES, PAGE_BYTES) // slot_bytes) if slot_bytes < RUN_BYTES else 1
    left = room - quota - run * readers
    fixed = table_bytes(types, id_dtype, [0] * len(types))
    num_bytes = left * slot_bytes - fixed
    one = estimate.structure_bytes * (_SLACK + 1) // _SLACK
    together = bool(estimate.scratch_bytes)  # sampled so: an area holds all of them
    spare = estimate.scratch_bytes * (_SLACK + 1) // _SLACK
    ahead = 2 * one + spare if together else one * (_CHUNKS + 2) // _CHUNKS
    size = choose_size(list(estimate.rows), each, ahead, max(0, num_bytes), most)
    if asked:  # the structure of so many, whatever becomes of their rows
        size = min(asked, max(size, num_bytes // 2 // max(1, ahead)))
    chunk = size if together else -(-size // _CHUNKS)
    areas = 2 if together else -(-size // chunk) + min(2, size)
    area = max(need.structure, -(-chunk * one // slot_bytes))
    scratch = -(-max(size * spare, estimate.least_scratch) // slot_bytes) if together else 0
    left -= areas * area + scratch
    if left < 0:
        return cut_without_cache(room, slot_bytes, need, estimate, most)
    entries = tuple(share_entries(types, left * slot_bytes - fixed - 2 * slot_bytes, item))
    while entries and min(entries) > 0:
        tables = -(-table_bytes(types, id_dtype, list(entries)) // slot_bytes)
        rows = area_slots_of(types, entries, slot_bytes)
        if tables + rows <= left:
            break
        entries = tuple(n - max(1, n // 64) for n in entries)
    wanted = grown(list(estimate.rows), _LEAST_BATCHES)
    if not types or sum(max(0, n) for n in entries) < min(wanted, sum(t.num_nodes for t in types)):
        return cut_without_cache(room, slot_bytes, need, estimate, most)
    return HyperSizing(size, chunk, areas, area, scratch, tables, entries, rows, run, quota)


def cut_without_cache(
    room: int, slot_bytes: int, need: SessionNeed, estimate: Estimate, most: int
) -> HyperSizing | None:
    """Where the rows of two minibatches have no room: the graph alone is read for many together.

    None where not even two are sampled together, or the graph is in memory.
    """
    if not estimate.scratch_bytes:
        return None
    quota = max(need.least_quota, room // 3)  # rows pass through it, part by part
    one = estimate.structure_bytes * (_SLACK + 1) // _SLACK
    spare = estimate.scratch_bytes * (_SLACK + 1) // _SLACK
    size = min(most, max(0, room - quota) * slot_bytes // (one + spare))
    while size > 1:
        area = max(need.structure, -(-size * one // slot_bytes))
        scratch = -(-max(size * spare, estimate.least_scratch) // slot_bytes)
        if quota + area + scratch <= room:
            return HyperSizing(size, size, 1, area, scratch, 0, (), 0, 0, quota)
        size -= 1
    return None
