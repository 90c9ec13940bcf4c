"""How much of the arena a session of hop-wise batches takes, and how it hands them over."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blockstore.format import PAGE_BYTES, align
from blockstore.units import format_bytes
from loaderd.api.errors import Refused
from loaderd.memory.ledger import Budget, EngineSettings, enough_mem
from loaderd.memory.workspace import ALIGN, Carver
from loaderd.plans.chunks import HopPlan
from loaderd.sampling.propagated.files import HopArray

MAX_RANGES = 64  # of a batch; with more of them rows are taken one by one
_ON_THE_WAY = 128 << 20  # bytes of batches in flight that keep a disk and a trainer busy
_TRANSIT_BYTES = 1 << 16  # of a buffer that pages pass through, at least
_MIN_WINDOW, _MAX_WINDOW = 4, 64
_HELD_WINDOW = 32  # if arrays are in memory: batches in flight cost next to nothing
_SHARE = 4  # a session takes one in so many of the slots that are free, if nothing else is asked


class HopSizing(NamedTuple):
    """Slots for each part, all of them runs."""

    ranges: bool  # batches are ranges of rows, else rows by number
    held: bool  # arrays are in memory whole
    arrays: int  # slots of arrays that are not in memory yet
    buffer: int  # of what a batch needs beside them
    window: int  # batches in flight, each with a buffer
    run: int  # of a buffer that pages pass through
    transit: int  # how many of these
    depth: int  # batches that are being read at once, at most

    @property
    def own(self) -> int:
        """Slots beside the arrays that are held."""
        return self.window * self.buffer + self.transit * self.run

    @property
    def minimum(self) -> int:
        """The fewest of these: with one batch in flight."""
        return self.buffer + self.transit * self.run

    def basis(self, num_arrays: int) -> str:
        where = "in memory whole" if self.held else "passing by"
        return (
            f"{num_arrays} hop-wise arrays {where}; {self.window} batches x {self.buffer} slots, "
            f"{self.transit} x {self.run} to read through"
        )


def size_hops(
    plan: HopPlan,
    arrays: Sequence[HopArray],
    settings: EngineSettings,
    budget: Budget,
    available: int,
    missing: int,
    window: int,
    held: bool = True,
) -> HopSizing:
    """Size the memory of a session.

    available   slots that can be taken
    missing     slots of arrays that are not in memory yet
    window      batches in flight that the client would like, 0: as many as is good
    held        False: arrays are not to be held

    Raises Refused, with the least --mem that would do.
    """

    slot_bytes = budget.slot_bytes

    def slots(num_bytes: int) -> int:
        return -(-num_bytes // slot_bytes)

    rows = plan.max_rows
    batch_bytes = max(1, sum(rows * a.row_bytes for a in arrays))
    usual = max(_MIN_WINDOW, min(_MAX_WINDOW, _ON_THE_WAY // batch_bytes))
    asked, window = window, window or usual
    in_chunks = plan.hops.method == "cr" or not plan.resolved.shuffle
    ranges = in_chunks and plan.max_ranges <= MAX_RANGES
    passing = passing_bytes(plan, arrays)
    room = int(available * settings.session_share) if missing else available
    index = 0 if ranges else slots(8 * rows)
    ahead = asked or max(usual, _HELD_WINDOW)
    if held and missing + ahead * index <= room:
        return HopSizing(ranges, True, missing, index, ahead, 0, 0, min(ahead, usual))
    if plan.max_ranges > 2 and passing > 2 * batch_bytes:
        ranges = False  # most of these pages is not wanted
    if ranges:
        buffer, run, transit = slots(passing), 0, 0
    else:
        widest = max(a.row_bytes for a in arrays)
        run = slots(max(_TRANSIT_BYTES, align(widest, PAGE_BYTES) + PAGE_BYTES))
        buffer, transit = slots(gathered_bytes(plan, arrays)), settings.readers
    while transit > 2 and buffer + transit * run > room // 2:
        transit -= 1
    minimum = buffer + transit * run
    if minimum > available:
        enough = enough_mem(settings, budget.unused_bytes, (minimum - available) * slot_bytes)
        raise Refused(shortage_text(minimum * slot_bytes, available * slot_bytes, enough))
    share = room if asked else room // _SHARE  # others may want to be served too
    window = max(1, min(window, (share - transit * run) // buffer))
    return HopSizing(ranges, False, 0, buffer, window, run, transit, min(window, usual))


def shortage_text(min_bytes: int, available_bytes: int, enough: str) -> str:
    """`enough`: the --mem that would do."""
    return (
        f"the session needs {format_bytes(min_bytes)} of the arena for a batch, "
        f"{format_bytes(available_bytes)} can be had: serve with at least --mem {enough}, or ask "
        "for a smaller batch_size"
    )


def passing_bytes(plan: HopPlan, arrays: Sequence[HopArray]) -> int:
    """Memory for the pages of a batch's ranges: each may begin and end inside a page."""
    ranges = plan.max_ranges
    return sum(
        (plan.max_rows * a.row_bytes // PAGE_BYTES + 2 * ranges) * PAGE_BYTES for a in arrays
    )


def gathered_bytes(plan: HopPlan, arrays: Sequence[HopArray]) -> int:
    """Memory for a batch's rows one after the other, and for reading them page by page."""
    carver = Carver(None)
    rows = plan.max_rows
    carver.array(np.uint8, sum(align(rows * a.row_bytes, ALIGN) for a in arrays))
    for _ in range(3):  # rows in order, sorted, and which is which
        carver.array(np.int64, rows)
    carver.array(np.int64, 5 * rows * len(arrays))
    return carver.used
