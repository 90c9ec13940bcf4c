"""The record that comes with each picked edge beside its source: words of four bytes."""

from typing import NamedTuple

import numpy as np

from blockstore.kernels.jit import inner
from blockstore.kernels.packed import ask_for_picks

_LOW = np.int64(0xFFFFFFFF)


class EdgeRecord(NamedTuple):
    """Words of an edge in each section, in this order; 0: it has none there.

    The sections lie one after the other in a record, each by itself in a block, and in what is
    kept of members' columns.  Blocks hold no items: those of a column's edges follow one another.
    """

    ids: int = 0  # 1, or 2 of 64 bits
    weights: int = 0  # 1: float32
    times: int = 0  # 2: int64
    items: int = 0  # 1 or 2: number of an edge among the nodes and edges that have rows

    @property
    def size(self) -> int:
        return sum(self)


class RecordPlaces(NamedTuple):
    """Of the first edge of a column: its first word in each section, and its item."""

    ids: int
    weights: int
    times: int
    items: int


@inner
def _copy(words, own, first, position, wanted, out, row, at):
    """One section of an edge: `wanted` words, of which `own` are there, the others are zeros."""
    for k in range(wanted):
        out[row, at + k] = words[first + position * own + k] if k < own else np.uint32(0)
    return at + wanted


@inner
def put_record(words, own, places, position, wanted, out, row):
    """Write the record of an edge of a column to out[row].

    words     uint32: where the sections lie
    own       EdgeRecord: of an edge there; without items these follow from that of the first
    places    RecordPlaces; with items among `own` their first word in place of the item
    position  of the edge in the column, or in the part of it that lies here
    """
    at = _copy(words, own.ids, places.ids, position, wanted.ids, out, row, np.int64(0))
    at = _copy(words, own.weights, places.weights, position, wanted.weights, out, row, at)
    at = _copy(words, own.times, places.times, position, wanted.times, out, row, at)
    if own.items:
        _copy(words, own.items, places.items, position, wanted.items, out, row, at)
    elif wanted.items:
        item = np.int64(places.items) + np.int64(position)
        out[row, at] = np.uint32(item & _LOW)
        if wanted.items == 2:
            out[row, at + 1] = np.uint32(item >> 32)


@inner
def ask_for_records(words, own, places, wanted, degree, positions, at, found, whole):
    """Prefetch what `put_record` reads of a column's picks; as `ask_for_picks`."""
    _ask(words, places.ids, own.ids, wanted.ids, degree, positions, at, found, whole)
    _ask(words, places.weights, own.weights, wanted.weights, degree, positions, at, found, whole)
    _ask(words, places.times, own.times, wanted.times, degree, positions, at, found, whole)
    _ask(words, places.items, own.items, wanted.items, degree, positions, at, found, whole)


@inner
def _ask(words, first, own, wanted, degree, positions, at, found, whole):
    """Prefetch one section of the records, if it is wanted and the edges there have it."""
    if wanted and own:
        ask_for_picks(words, 32 * first, 32 * own, degree, positions, at, found, whole)
