"""Replays what hyperbatches needed under other policies: `python -m tools.traces TRACE STORE`.

A trace is written by `loaderd serve --trace FILE` (its records: `loaderd/trace.py`).

Rows: groups of batches as they were, a cache of `--entries` rows.  A group's rows must all be there
at once; what is absent is read by runs of pages, as the daemon does.  `optimal` (Belady's MIN) lets
those rows go that are needed furthest in the future; no policy reads fewer rows.  `next-use` knows
the next `--look` groups, and lets those go first that come in none of them and were seldom used.

Graph blocks: hop after hop, a block that a hop needs is read unless it is in memory.  `optimal`
takes a hop's blocks in whatever order it likes, and keeps those of all that it held or read which
are needed soonest; no order and no policy reads fewer.  `present first` is the daemon's: what is in
memory, then the rest, whose last ones stay.  `lru` and `second-chance` go in ascending order.

Prints a JSON line per policy: rows or blocks needed and read, bytes.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.store import Store, open_store
from blockstore.units import parse_bytes
from loaderd.devicecost import FLASH
from loaderd.trace import BLOCKS, ROWS
from tools.command import parse, put
from tools.layout import touched
from tools.replay import (
    LRU,
    NEXT_USE,
    OPTIMAL,
    PRESENT_FIRST,
    SECOND_CHANCE,
    replay_blocks,
    replay_rows,
)

_HEAD = 4
ROW_POLICIES = {
    "optimal": OPTIMAL, "next-use": NEXT_USE, "lru": LRU, "second-chance": SECOND_CHANCE,
}  # fmt: skip
BLOCK_POLICIES = {
    "optimal": OPTIMAL, "present first": PRESENT_FIRST, "lru": LRU, "second-chance": SECOND_CHANCE,
}  # fmt: skip


class Record(NamedTuple):
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


class Needs(NamedTuple):
    """What comes after what: `ids[starts[g] : starts[g + 1]]`, each once, are needed at time g."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    after: NDArray[np.int64]  # the next time that needs the id, the number of times if none does

    @property
    def times(self) -> int:
        return self.starts.size - 1


def needs_of(groups: list[NDArray[np.int64]], num_ids: int) -> Needs:
    """Groups of ids below `num_ids`, and when each is needed again."""
    starts = np.concatenate([[0], np.cumsum([g.size for g in groups])]).astype(np.int64)
    ids = np.concatenate([np.empty(0, np.int64), *groups])
    after = np.empty(ids.size, np.int64)
    coming = np.full(num_ids, len(groups), np.int64)
    for time in range(len(groups) - 1, -1, -1):
        own = slice(starts[time], starts[time + 1])
        after[own] = coming[ids[own]]
        coming[ids[own]] = time
    return Needs(ids, starts, after)


def row_lines(
    store: Store, records: list[Record], room: int, look: int, gap_pages: int
) -> list[dict[str, Any]]:
    """A line per policy: what the groups' rows cost.  Raises ValueError: a group has no room."""
    groups, lines = row_groups(records), []
    needs = needs_of(groups, store.manifest.num_nodes)
    read = np.empty(needs.ids.size, np.uint8)
    for name, policy in ROW_POLICIES.items() if groups else ():
        full = replay_rows(*needs, room, store.manifest.num_nodes, policy, look, read)
        if full >= 0:
            raise ValueError(
                f"group {full} needs {groups[full].size} rows, there is room for {room}: "
                "give --entries as the daemon had them"
            )
        bytes_read = 0
        for time, group in enumerate(groups):
            absent = group[read[needs.starts[time] : needs.starts[time + 1]] > 0]
            rows = absent.astype(store.manifest.id_dtype)
            bytes_read += touched(store, rows, gap_pages).read_bytes
        lines.append(
            {
                "what": "rows", "policy": name, "room": room, "groups": len(groups),
                "needed": needs.ids.size, "read": int(read.sum()), "bytes": bytes_read,
            }
        )  # fmt: skip
    return lines


def hop_blocks(records: list[Record]) -> tuple[list[NDArray[np.int64]], int]:
    """Graph blocks of each hop by numbers of their own, all relations', and how many there are."""
    named = [r.ids + (r.number << 40) for r in records if r.kind == BLOCKS]
    names = np.unique(np.concatenate([np.empty(0, np.int64), *named]))
    return [np.searchsorted(names, ids) for ids in named], names.size


def block_lines(store: Store, records: list[Record], slots: int) -> list[dict[str, Any]]:
    """A line per policy: what the hops' graph blocks cost."""
    hops, num_blocks = hop_blocks(records)
    needs, lines = needs_of(hops, num_blocks), []
    for name, policy in BLOCK_POLICIES.items() if hops else ():
        read = int(replay_blocks(*needs, slots, num_blocks, policy))
        lines.append(
            {
                "what": "graph blocks", "policy": name, "room": slots, "hops": len(hops),
                "needed": needs.ids.size, "read": read, "bytes": read * store.manifest.block_bytes,
            }
        )  # fmt: skip
    return lines


@dataclass(frozen=True)
class Options:
    trace: Path
    store: Path
    entries: Annotated[int, "rows that the cache holds"] = 0
    look: Annotated[int, "groups that next-use knows of"] = 1
    gap_pages: Annotated[int, "read over"] = FLASH.gap_pages
    graph_mem: Annotated[str, "memory for graph blocks"] = "0"


def main(words: list[str]) -> list[dict[str, Any]]:
    """Replay a trace; returns the lines that are printed."""
    given = parse(Options, words, __doc__, "tools.traces")
    store = open_store(given.store)
    records = list(read_trace(given.trace))
    lines = []
    if given.entries:
        lines += row_lines(store, records, given.entries, given.look, given.gap_pages)
    slots = parse_bytes(given.graph_mem) // store.manifest.block_bytes
    lines += block_lines(store, records, slots) if slots else []
    return [put(line, None) for line in lines]


if __name__ == "__main__":
    main(sys.argv[1:])
