"""Digests of rows and of columns, to compare copies that are not in memory together."""

import numpy as np

from blockstore.kernels.intrinsics import wrap_add, wrap_mul
from blockstore.kernels.jit import inner, njit

_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)


@inner
def fold(digest, word):
    """A digest that has seen one more word; uint64."""
    mixed = wrap_mul(wrap_add(digest ^ np.uint64(word), _ODD), _ODD)
    return mixed ^ (mixed >> np.uint64(29))


@njit(nogil=True, cache=True)
def digest_columns(words, begins, columns, digests):
    """Continue digests of columns by the edges that are here; a row is a column of one.

    words    uint8 or uint32 (edges, words)
    begins   int64 (any + 1,)         first edge of each column of a block, then all
    columns  int64 (chosen,)          which of these
    digests  uint64 (chosen,)         in and out
    """
    for i in range(columns.size):
        digest = digests[i]
        for k in range(begins[columns[i]], begins[columns[i] + 1]):
            for j in range(words.shape[1]):
                digest = fold(digest, words[k, j])
        digests[i] = digest
