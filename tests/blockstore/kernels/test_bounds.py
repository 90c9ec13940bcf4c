"""The run with bounds checks has them, whatever a run without left in numba's cache."""

import numpy as np
import pytest
from numba import config

from blockstore.kernels.jit import leaf
from blockstore.kernels.order import take_ids

checked = pytest.mark.skipif(
    not (config.BOUNDSCHECK or config.DISABLE_JIT), reason="needs NUMBA_BOUNDSCHECK=1"
)


@leaf
def _item(values, i):
    return values[i]


@checked
def test_an_index_beyond_an_array_is_refused():
    seeds, out = np.arange(3, dtype=np.uint32), np.zeros(1, np.uint32)
    with pytest.raises(IndexError):
        take_ids(seeds, np.array([3], np.int64), 1, out)
    with pytest.raises(IndexError):
        _item(seeds, 3)
