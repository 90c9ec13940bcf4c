"""Replays what hyperbatches needed under other policies: `python -m tools.traces TRACE STORE`.

A trace is written by `loaderd serve --trace FILE` (its records: `loaderd/trace.py`).  Rows: groups
of batches as they were, a cache of `--entries` rows; a group's rows must all be there at once, what
is absent is read by runs of pages, as the daemon does.  The optimal policy (Belady's MIN) lets the
rows go that are needed furthest in the future.  Graph blocks: hop after hop, a block that a hop
needs is read unless it is in memory.  Prints a JSON line per policy: rows, pages and bytes.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.kernels.rowcache import plan_extents
from blockstore.store import Store, open_store
from blockstore.units import parse_bytes
from loaderd.devicecost import FLASH
from loaderd.hypercut import RUN_BYTES
from loaderd.ledger import served_rows
from loaderd.trace import BLOCKS, ROWS

_HEAD = 4
NEVER = np.iinfo(np.int64).max
POLICIES = ("optimal", "lru", "fifo")


class Record(NamedTuple):
    """One record of a trace."""

    kind: int
    run: int
    number: int
    ids: NDArray[np.int64]


def read_trace(path: Path) -> Iterator[Record]:
    """Records in order; a last one that is cut off is left out."""
    raw = np.fromfile(path, np.int64)
    at = 0
    while at + _HEAD <= raw.size:
        kind, run, number, count = (int(v) for v in raw[at : at + _HEAD])
        at += _HEAD
        if at + count > raw.size:
            return
        yield Record(kind, run, number, raw[at : at + count])
        at += count


def row_groups(records: list[Record]) -> list[NDArray[np.int64]]:
    """The different rows of each group of batches, ascending, in order of the groups."""
    found: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    for record in records:
        if record.kind == ROWS:
            found.setdefault((record.run, record.number), []).append(record.ids)
    return [np.unique(np.concatenate(parts)) for parts in found.values()]


def next_uses(groups: list[NDArray[np.int64]], num_ids: int) -> list[NDArray[np.int64]]:
    """For each id of each group, the next group that needs it, NEVER if none does."""
    coming = np.full(num_ids, NEVER, np.int64)
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(groups)
    for number in range(len(groups) - 1, -1, -1):
        found[number] = coming[groups[number]]
        coming[groups[number]] = number
    return found


def replay(
    groups: list[NDArray[np.int64]], room: int, num_ids: int, policy: str
) -> Iterator[NDArray[np.int64]]:
    """What each group has to read, ascending, with room for `room` ids that groups need at once.

    Raises ValueError: a group alone needs more.
    """
    held = np.zeros(num_ids, bool)
    rank = np.zeros(num_ids, np.int64)  # who goes first is greatest
    after = next_uses(groups, num_ids)
    for number, group in enumerate(groups):
        if group.size > room:
            raise ValueError(f"group {number} needs {group.size} rows, there is room for {room}")
        absent = group[~held[group]]
        inside = np.flatnonzero(held)
        short = inside.size + absent.size - room
        if short > 0:
            needed = np.zeros(num_ids, bool)
            needed[group] = True
            others = inside[~needed[inside]]
            leave = others[np.argsort(-rank[others], kind="stable")[:short]]
            held[leave] = False
        held[absent] = True
        if policy == "optimal":
            rank[group] = after[number]
        elif policy == "lru":
            rank[group] = -number
        else:
            rank[absent] = -number
        yield absent


def pages_of(store: Store, rows: NDArray[np.int64]) -> int:
    """Pages that are read to bring in these rows of a type, of every array, in runs."""
    pages = 0
    listed = rows.astype(store.manifest.id_dtype)
    for served in served_rows(store.manifest):
        geometry = row_geometry(served.array, store.manifest.block_bytes)
        first = served.node_type.first
        low, high = np.searchsorted(rows, [first, first + served.node_type.num_nodes])
        own = listed[low:high] - listed.dtype.type(first)
        runs = np.empty((own.size, 5), np.int64)
        count = plan_extents(
            own, 0, own.size, geometry.rows_per_block, served.array.row_bytes, geometry.slot_bytes,
            geometry.blocks_per_shard, FLASH.gap_pages, RUN_BYTES // PAGE_BYTES, runs,
        )  # fmt: skip
        pages += int(runs[:count, 2].sum())
    return pages


def row_lines(store: Store, records: list[Record], room: int) -> list[dict[str, Any]]:
    """A line per policy: what the groups' rows cost."""
    groups = row_groups(records)
    lines = []
    for policy in POLICIES if groups else ():
        rows = pages = 0
        for absent in replay(groups, room, store.manifest.num_nodes, policy):
            rows += absent.size
            pages += pages_of(store, absent)
        lines.append(
            {
                "what": "rows", "policy": policy, "room": room, "groups": len(groups),
                "needed": sum(g.size for g in groups), "read": rows, "bytes": pages * PAGE_BYTES,
            }
        )  # fmt: skip
    return lines


def block_lines(store: Store, records: list[Record], slots: int) -> list[dict[str, Any]]:
    """A line per policy: what the hops' graph blocks cost.

    A hop needs no two blocks at once, so an optimal policy keeps what comes first in the next hop:
    of a hop that needs more than there is room for, `slots` blocks are never read again.
    """
    lines = []
    hops = [r.ids for r in records if r.kind == BLOCKS]
    for policy in ("optimal", "lru in order") if hops else ():
        read, held = 0, np.empty(0, np.int64)
        for needed in hops:
            present = np.isin(needed, held)
            if policy == "optimal":
                read += int((~present).sum())
                keep = needed[present]
                held = np.concatenate([keep, needed[~present]])[-slots:] if slots else held[:0]
            else:
                recent = dict.fromkeys(held.tolist())
                for block in needed.tolist():
                    if block in recent:
                        del recent[block]
                    else:
                        read += 1
                        if len(recent) == slots:
                            del recent[next(iter(recent))]
                    recent[block] = None
                held = np.fromiter(recent, np.int64, len(recent))
        lines.append(
            {
                "what": "graph blocks", "policy": policy, "room": slots, "hops": len(hops),
                "needed": sum(h.size for h in hops), "read": read,
                "bytes": read * store.manifest.block_bytes,
            }
        )  # fmt: skip
    return lines


def main(words: list[str]) -> list[dict[str, Any]]:
    """Replay a trace; returns the lines that are printed."""
    parser = argparse.ArgumentParser(prog="tools.traces", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--entries", type=int, default=0, help="rows that the cache holds")
    parser.add_argument("--graph-mem", default="0", help="memory for graph blocks")
    given = parser.parse_args(words)
    store = open_store(given.store)
    records = list(read_trace(given.trace))
    lines = row_lines(store, records, given.entries) if given.entries else []
    slots = parse_bytes(given.graph_mem) // store.manifest.block_bytes
    lines += block_lines(store, records, slots) if slots else []
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
