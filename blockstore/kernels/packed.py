"""Numbers of equal width in a stream of bits: ids as graph blocks hold them (FORMAT.md)."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import load_bits, prefetch_bit, wrap_add, wrap_sub
from blockstore.kernels.jit import inner, leaf

_ALL = np.uint64(2**64 - 1)
LINE_BITS = 512  # of a cache line
FEW_LINES = 16  # of what is copied whole; the processor asks for the rest by itself


class PackedIds(NamedTuple):
    """Ids in a stream of bits; each is found by the place of its first bit in `data`."""

    data: NDArray[Any]  # as of `load_bits`
    bits: int  # of an id: 1 to 57, or 64
    base: np.uint64  # is added to each


@inner
def view_ids(ids):
    """Ids in an array of their own."""
    return PackedIds(ids, 8 * ids.itemsize, np.uint64(0))


@inner
def id_at(ids, bit):
    """The id that begins at a bit, uint64.

    In a stream of bits the 8 bytes may reach into a cache line that was not asked for.  To read it
    from its aligned word where it ends there, or to ask for both lines, takes longer than that does
    (fanout 25: 1.09 and 1.14 times what ids take that are not packed, against 1.04).
    """
    word = load_bits(ids.data, bit)
    return wrap_add(word & (_ALL >> np.uint64(64 - ids.bits)), ids.base)


@inner
def ask_for_id(ids, bit):
    """Prefetch what `id_at` reads."""
    prefetch_bit(ids.data, bit)


@inner
def ask_for_picks(data, first, bits, degree, positions, at, found, whole):
    """Prefetch what a column's picks read: its cache lines, or those of the picks if fewer.

    data       any dtype
    first      bit in `data` at which the first of the column's `degree` edges begins
    bits       of an edge
    positions  picked edges, by place in the column: positions[at : at + found], or with `whole` all
    """
    size = degree * bits
    if whole or size <= found * LINE_BITS:
        stop = first + (min(size, FEW_LINES * LINE_BITS) if whole else size)
        for bit in range(first, stop, LINE_BITS):
            prefetch_bit(data, bit)
        prefetch_bit(data, stop - 1)
    else:
        for k in range(np.uint64(at), np.uint64(at + found)):
            prefetch_bit(data, first + np.int64(positions[k]) * bits)


@leaf
def unpack_ids(ids, bit, out):
    """out[k] = the k-th id from a bit on; id_dtype (count,)."""
    for k in range(out.size):
        out[k] = id_at(ids, bit + k * ids.bits)


@leaf
def pack_ids(values, base, bits, words, bit):
    """Add numbers, after `base` is taken away, to a stream from a bit on; whether all have room.

    values   id_dtype (count,)
    base     uint64
    words    uint64   zeros from that bit on; a word more than the stream needs
    """
    one, over = np.uint64(1), np.uint64(0)
    for k in range(values.size):
        value = wrap_sub(np.uint64(values[k]), base)
        at = bit + k * bits
        shift = np.uint64(at & 63)
        words[at >> 6] |= value << shift
        words[(at >> 6) + 1] |= (value >> one) >> (np.uint64(63) - shift)
        over |= value >> np.uint64(bits)
    return over == 0
