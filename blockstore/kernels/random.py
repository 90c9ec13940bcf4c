"""Random numbers without state: a draw hashes (seed, epoch, step, hop, relation, node, draw)."""

import numpy as np

from blockstore.kernels.intrinsics import mulhi, wrap_add, wrap_mul
from blockstore.kernels.jit import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_ROUNDS = 6
_MIN_HALF = 3  # bits: with fewer there are too few round functions to be uniform
_BITS = 2**64 - 1


@njit(nogil=True, cache=True, inline="always")
def mix(x):
    """A bijection of uint64 that scrambles every bit (splitmix64's finalizer).

    Source: Steele, Lea and Flood, OOPSLA 2014.
    """
    x = np.uint64(x)
    x = wrap_mul(x ^ (x >> _S30), _M1)
    x = wrap_mul(x ^ (x >> _S27), _M2)
    return x ^ (x >> _S31)


@njit(nogil=True, cache=True)
def _hop_key(seed, epoch, step, hop, relation):
    key = mix(wrap_add(seed, _GOLDEN))
    key = mix(key ^ wrap_add(epoch, _GOLDEN))
    key = mix(key ^ wrap_add(step, _GOLDEN))
    key = mix(key ^ wrap_add(hop, _GOLDEN))
    return mix(key ^ wrap_add(relation, _GOLDEN))


@njit(nogil=True, cache=True)
def _epoch_key(seed, epoch):
    return mix(mix(wrap_add(seed, _M1)) ^ wrap_add(epoch, _M2))


def make_key(seed: int, epoch: int, step: int, hop: int, relation: int) -> int:
    """Key of one hop's draws over one relation: a uint64 as a Python int; not for use in kernels.

    Any integers will do: they are taken modulo 2**64.
    """
    return int(_hop_key(*(np.uint64(x & _BITS) for x in (seed, epoch, step, hop, relation))))


def make_epoch_key(seed: int, epoch: int) -> int:
    """Key of the order of seeds in an epoch, as `make_key`."""
    return int(_epoch_key(np.uint64(seed & _BITS), np.uint64(epoch & _BITS)))


@njit(nogil=True, cache=True, inline="always")
def node_key(key, node):
    """Key of one node's draws."""
    return mix(key ^ wrap_add(wrap_mul(np.uint64(node), _GOLDEN), _M1))


@njit(nogil=True, cache=True, inline="always")
def draw_hash(nkey, draw):
    """Hash of draw number `draw` under a node's key, uint64."""
    return mix(wrap_add(nkey, wrap_mul(np.uint64(draw), _GOLDEN)))


@njit(nogil=True, cache=True, inline="always")
def bounded(hashed, bound):
    """A uint64 hash as an int64 in [0, bound), uniform to 2**-64."""
    return np.int64(mulhi(hashed, np.uint64(bound)))


@njit(nogil=True, cache=True, inline="always")
def draw_below(key, node, draw, bound):
    """Draw number `draw` of `node` under `key`: int64, uniform in [0, bound), bound >= 1."""
    return bounded(draw_hash(node_key(key, node), draw), bound)


@njit(nogil=True, cache=True)
def permute(index, size, key):
    """Where `index` goes in the keyed bijection of [0, size), size >= 1; O(1) memory.

    A balanced Feistel network on the next even number of bits, six at least, walked until the
    value is in range (fewer than four times on average, from size 17 on).
    Source: Black and Rogaway, CT-RSA 2002.
    """
    half = _MIN_HALF
    while np.int64(1) << (2 * half) < size:
        half += 1
    shift = np.uint64(half)
    mask = (np.uint64(1) << shift) - np.uint64(1)
    value = np.uint64(index)
    while True:
        left, right = value >> shift, value & mask
        for r in range(_ROUNDS):
            tweak = wrap_add(key, wrap_mul(np.uint64(r), _M2))
            hashed = mix(wrap_add(wrap_mul(right, _GOLDEN), tweak))
            left, right = right, left ^ (hashed & mask)
        value = (left << shift) | right
        if value < np.uint64(size):
            return np.int64(value)


@njit(nogil=True, cache=True)
def permute_range(start, stop, size, key, out):
    """out[i - start] = permute(i, size, key) for start <= i < stop; out integers."""
    for i in range(start, stop):
        out[i - start] = permute(i, size, key)


@njit(nogil=True, cache=True)
def draw_each(key, bound, out):
    """out[i] = draw 0 of number i under `key`: int64, uniform in [0, bound), bound >= 1."""
    for i in range(out.size):
        out[i] = draw_below(key, i, 0, bound)


@njit(nogil=True, cache=True)
def permute_each(index, size, key, out):
    """out[i] = permute(index[i], size, key) if index[i] < size, else index[i]; int64, int64."""
    for i in range(index.size):
        out[i] = permute(index[i], size, key) if index[i] < size else index[i]
