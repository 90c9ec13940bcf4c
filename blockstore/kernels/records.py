"""What comes with each picked edge beside its source: a record of words of four bytes."""

from typing import NamedTuple

import numpy as np

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import inner

_LINE_WORDS = 16
_FEW_LINES = 16  # of a section that is copied whole; the processor asks for the rest by itself
_LOW = np.int64(0xFFFFFFFF)


class EdgeRecord(NamedTuple):
    """Words of an edge in each section, in this order; 0: it has none there.

    The sections lie one after the other in a record, each by itself in a block, and in what is
    kept of members' columns.  Items lie in records alone.
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
    """The record of an edge of a column, to out[row].

    words     uint32: where the sections lie
    own       EdgeRecord: of an edge there; items follow from that of the first
    places    RecordPlaces
    position  of the edge in the column, or in the part of it that lies here
    """
    at = _copy(words, own.ids, places.ids, position, wanted.ids, out, row, np.int64(0))
    at = _copy(words, own.weights, places.weights, position, wanted.weights, out, row, at)
    at = _copy(words, own.times, places.times, position, wanted.times, out, row, at)
    if wanted.items:
        item = np.int64(places.items) + np.int64(position)
        out[row, at] = np.uint32(item & _LOW)
        if wanted.items == 2:
            out[row, at + 1] = np.uint32(item >> 32)


@inner
def _ask(words, own, first, degree, positions, at, found, whole):
    """Prefetch a section of a column's picks: its cache lines, or those of the picks if fewer."""
    size = degree * own
    if whole or size <= found * _LINE_WORDS:
        stop = first + (min(size, _FEW_LINES * _LINE_WORDS) if whole else size)
        for word in range(first, stop, _LINE_WORDS):
            prefetch(words, word)
        prefetch(words, stop - 1)
    else:
        for k in range(np.uint64(at), np.uint64(at + found)):
            prefetch(words, first + np.int64(positions[k]) * own)


@inner
def ask_for_records(words, own, places, wanted, degree, positions, at, found, whole):
    """Prefetch what `put_record` reads of a column's picks: positions[at : at + found]."""
    if wanted.ids and own.ids:
        _ask(words, own.ids, places.ids, degree, positions, at, found, whole)
    if wanted.weights and own.weights:
        _ask(words, own.weights, places.weights, degree, positions, at, found, whole)
    if wanted.times and own.times:
        _ask(words, own.times, places.times, degree, positions, at, found, whole)
