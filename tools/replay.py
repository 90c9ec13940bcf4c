"""Replays what hyperbatches needed under other policies: `python -m tools.replay TRACE STORE`.

A trace is written by `loaderd serve --trace FILE` (its records: `loaderd/monitoring/trace.py`).

Rows: groups of batches as they were, a cache of `--entries` rows.  A group's rows must all be there
at once; what is absent is read by the pages that hold it.  `optimal` (Belady's MIN) lets
those rows go that are needed furthest in the future; no policy reads fewer rows.  `next-use` knows
the next `--look` groups, and lets those go first that come in none of them and were seldom used.

Graph blocks: pass after pass, a block that one needs is read unless it is in memory.  `optimal`
takes a pass's blocks in whatever order it likes, and keeps those of all that it held or read which
are needed soonest; no order and no policy reads fewer.  `present first` is the daemon's: what is in
memory, then the rest, whose last ones stay.  `lru` goes in ascending order.

Prints a JSON line per policy: rows or blocks needed and read, bytes.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.kernels.rowcache import plan_extents
from blockstore.kernels.rows import row_layout
from blockstore.store import Store, open_store
from blockstore.units import parse_bytes
from loaderd.memory.ledger import served_rows
from loaderd.monitoring.devicecost import RUN_BYTES
from loaderd.monitoring.trace import BLOCKS, ROWS
from tools.command import parse, put

_HEAD = 4
_MAX_USES, _HALVE_EVERY = 15, 8  # as the daemon counts them
ROW_POLICIES = ("optimal", "next-use", "lru")
BLOCK_POLICIES = ("optimal", "present first", "lru")
Ids = NDArray[np.int64]


class TraceRecord(NamedTuple):
    kind: int
    run: int
    number: int
    ids: Ids


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """Records in order; an incomplete last record is left out."""
    raw = np.fromfile(path, np.int64)
    at = 0
    while at + _HEAD <= raw.size:
        kind, run, number, count = (int(v) for v in raw[at : at + _HEAD])
        at += _HEAD
        if at + count > raw.size:
            return
        yield TraceRecord(kind, run, number, raw[at : at + count])
        at += count


def row_groups(records: Sequence[TraceRecord]) -> list[Ids]:
    """The distinct rows of each group of batches, ascending, in the order of groups."""
    found: dict[tuple[int, int], list[Ids]] = {}
    for record in records:
        if record.kind == ROWS:
            found.setdefault((record.run, record.number), []).append(record.ids)
    return [np.unique(np.concatenate(parts)) for parts in found.values()]


def hop_blocks(records: Sequence[TraceRecord]) -> tuple[list[Ids], int]:
    """Graph blocks of each hop, numbered across relations, and the number of all blocks."""
    named = [r.ids + (r.number << 40) for r in records if r.kind == BLOCKS]
    names = np.unique(np.concatenate([np.empty(0, np.int64), *named]))
    return [np.searchsorted(names, ids) for ids in named], names.size


def next_needs(groups: Sequence[Ids], num_ids: int) -> list[Ids]:
    """For each id of each group, the next group that needs it; the number of groups if none."""
    coming = np.full(num_ids, len(groups), np.int64)
    found = []
    for time in range(len(groups) - 1, -1, -1):
        found.append(coming[groups[time]])
        coming[groups[time]] = time
    return found[::-1]


def replay_rows(
    groups: Sequence[Ids], num_ids: int, room: int, policy: str, look: int = 1
) -> list[Ids]:
    """The rows of each group that are not in a cache of `room` entries when it comes.

    Among rows that are equal to the policy, that with the lowest id is evicted.
    Raises ValueError: a group does not fit.
    """
    held, end = np.zeros(num_ids, np.bool_), len(groups) - 1
    coming, last, uses = (np.zeros(num_ids, np.int64) for _ in range(3))
    found = []
    for time, (group, after) in enumerate(zip(groups, next_needs(groups, num_ids), strict=True)):
        if group.size > room:
            raise ValueError(
                f"group {time} needs {group.size} rows, there is room for {room}: "
                "give --entries as the daemon had them"
            )
        if (time + 1) % _HALVE_EVERY == 0:
            uses >>= 1
        absent = group[~held[group]]
        found.append(absent)
        held[group] = False
        others = np.flatnonzero(held)
        if (surplus := others.size + group.size - room) > 0:
            seen = min(time + look, end)
            rank = {  # the lowest is evicted first
                "optimal": -coming[others],
                "lru": last[others],
                "next-use": np.where(
                    coming[others] > seen, uses[others], _MAX_USES + 1 + seen - coming[others]
                ),
            }[policy]
            held[others[np.argsort(rank, kind="stable")[:surplus]]] = False
        held[group] = True
        uses[absent] = 0
        coming[group], last[group] = after, time
        uses[group] = np.minimum(uses[group] + 1, _MAX_USES)
    return found


def replay_blocks(hops: Sequence[Ids], num_ids: int, room: int, policy: str) -> int:
    """Number of blocks that are read, with room for `room` blocks."""
    if policy == "lru":
        return _replay_lru(hops, room)
    held, reads = np.zeros(num_ids, np.bool_), 0
    coming = np.zeros(num_ids, np.int64)
    for hop, after in zip(hops, next_needs(hops, num_ids), strict=True):
        present = held[hop]
        reads += hop.size - int(present.sum())
        coming[hop] = after
        if policy == "optimal":
            held[hop] = True
            some = np.flatnonzero(held)
            held[some[np.argsort(coming[some], kind="stable")[room:]]] = False
        else:
            held[:] = False
            held[np.concatenate([hop[present], hop[~present]])[-room:]] = True
    return reads


def _replay_lru(hops: Sequence[Ids], room: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    reads = 0
    for block in (int(b) for hop in hops for b in hop):
        if block in held:
            held.move_to_end(block)
            continue
        reads += 1
        held[block] = None
        if len(held) > room:
            held.popitem(last=False)
    return reads


def bytes_of_rows(store: Store, nodes: Ids) -> int:
    """Bytes of the pages that hold the rows of `nodes`, ascending store ids."""
    total, runs = 0, np.empty((nodes.size, 5), np.int64)
    for served in served_rows(store.manifest):
        geometry = row_geometry(served.array, store.manifest.block_bytes)
        first = served.node_type.first
        low, high = np.searchsorted(nodes, [first, first + served.node_type.num_nodes])
        rows = (nodes[low:high] - first).astype(store.manifest.id_dtype)
        layout = row_layout(geometry, served.array.row_bytes)
        count = plan_extents(rows, 0, rows.size, layout, 0, RUN_BYTES // PAGE_BYTES, runs)
        total += int(runs[:count, 2].sum()) * PAGE_BYTES
    return total


@dataclass(frozen=True)
class ReplayOptions:
    trace: Path
    store: Path
    entries: Annotated[int, "rows that the cache holds"] = 0
    look: Annotated[int, "groups that next-use knows of"] = 1
    graph_mem: Annotated[str, "memory for graph blocks; none if empty"] = ""


def main(words: list[str]) -> list[dict[str, Any]]:
    """Replay a trace; returns the printed lines."""
    given = parse(ReplayOptions, words)
    store = open_store(given.store)
    records = list(read_trace(given.trace))
    groups, num_nodes, lines = row_groups(records), store.manifest.num_nodes, []
    for policy in ROW_POLICIES if given.entries and groups else ():
        absent = replay_rows(groups, num_nodes, given.entries, policy, given.look)
        lines.append({
            "what": "rows", "policy": policy, "room": given.entries, "groups": len(groups),
            "needed": sum(g.size for g in groups), "read": sum(a.size for a in absent),
            "bytes": sum(bytes_of_rows(store, a) for a in absent),
        })  # fmt: skip
    graph_bytes = parse_bytes(given.graph_mem) if given.graph_mem else 0
    slots = graph_bytes // store.manifest.block_bytes
    hops, num_blocks = hop_blocks(records)
    for policy in BLOCK_POLICIES if slots and hops else ():
        read = replay_blocks(hops, num_blocks, slots, policy)
        lines.append({
            "what": "graph blocks", "policy": policy, "room": slots, "hops": len(hops),
            "needed": sum(h.size for h in hops), "read": read,
            "bytes": read * store.manifest.block_bytes,
        })  # fmt: skip
    return [put(line, None) for line in lines]


if __name__ == "__main__":
    main(sys.argv[1:])
