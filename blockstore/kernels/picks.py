"""Which of a column's edges are picked: positions, drawn without or with replacement."""

import numpy as np

from blockstore.kernels.intrinsics import mulhi
from blockstore.kernels.jit import leaf
from blockstore.kernels.random import draw_hash, mix, node_key

_LINEAR = 64  # fanout up to which a pick is looked for among the others one by one


@leaf
def scratch_size(fanout):
    """Slots of the set of picks that `pick_positions` needs, int64 (-1 where empty)."""
    size = 1
    while fanout > _LINEAR and size < 2 * fanout:
        size *= 2
    return size


@leaf
def _among(out, at, count, pick):
    """Whether `pick` is among out[at : at + count]."""
    for j in range(at, at + count):
        if np.uint64(out[j]) == pick:
            return True
    return False


@leaf
def _remember(scratch, pick):
    """Put `pick` into the set `scratch`; whether it was there already."""
    mask = np.uint64(scratch.size - 1)
    slot = mix(pick) & mask
    while scratch[slot] >= 0:
        if np.uint64(scratch[slot]) == pick:
            return True
        slot = (slot + np.uint64(1)) & mask
    scratch[slot] = pick
    return False


@leaf
def _pick_short(out, at, degree, fanout, nkey):
    """Floyd's picks of a column of 64 edges at most: a word of bits is the set, and no branch."""
    one, bits, place = np.uint64(1), np.uint64(0), np.uint64(at)
    for k in range(np.uint64(fanout)):
        last = np.uint64(degree - fanout) + np.uint64(k)
        pick = mulhi(draw_hash(nkey, k), last + one)
        taken = (bits >> pick) & one
        pick += taken * (last - pick)
        bits |= one << pick
        out[place + np.uint64(k)] = pick


@leaf
def _pick_few(out, at, degree, fanout, nkey):
    """Floyd's picks, _LINEAR at most: a word of bits tells most of them from those before."""
    one, low = np.uint64(1), np.uint64(63)
    bits, place = np.uint64(0), np.uint64(at)
    for k in range(np.uint64(fanout)):
        last = np.uint64(degree - fanout) + np.uint64(k)
        pick = mulhi(draw_hash(nkey, k), last + one)
        if (bits >> (pick & low)) & one and _among(out, place, np.uint64(k), pick):
            pick = last
        bits |= one << (pick & low)
        out[place + np.uint64(k)] = pick


@leaf
def _pick_many(out, at, degree, fanout, nkey, scratch):
    """Floyd's picks with a set of them."""
    place = np.uint64(at)
    scratch[:] = -1
    for k in range(np.uint64(fanout)):
        last = np.uint64(degree - fanout) + np.uint64(k)
        pick = mulhi(draw_hash(nkey, k), last + np.uint64(1))
        if _remember(scratch, pick):
            pick = last
            _remember(scratch, pick)
        out[place + np.uint64(k)] = pick


@leaf
def pick_positions(out, at, degree, fanout, replace, node, key, scratch):
    """out[at : at + fanout] = positions that a column's draws pick, by draw slot.

    out      any integers, wide enough for degree - 1
    degree   int64    more than fanout, or with replacement at least 1
    fanout   int64    0 or more
    scratch  int64 (scratch_size(fanout),)

    Without replacement by Floyd's method: draw k is uniform in [0, degree - fanout + k], and where
    it was picked before, that bound is picked.  Source: Bentley and Floyd, CACM 30(9), 1987.
    Draws are `draw_below(key, node, k, bound)`.
    """
    nkey = node_key(key, node)
    if replace:
        for k in range(np.uint64(fanout)):
            out[np.uint64(at) + np.uint64(k)] = mulhi(draw_hash(nkey, k), np.uint64(degree))
    elif degree <= 64:
        _pick_short(out, at, degree, fanout, nkey)
    elif scratch.size == 1:
        _pick_few(out, at, degree, fanout, nkey)
    else:
        _pick_many(out, at, degree, fanout, nkey, scratch)
