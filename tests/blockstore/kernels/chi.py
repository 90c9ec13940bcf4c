"""Pearson's test at fixed seeds, and the mark of tests that need many draws."""

import numpy as np
import pytest
from numba import config
from scipy.special import chdtrc

RARE = 1e-6

# without the JIT a draw takes microseconds; that it is the same draw is another test's
distribution = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled kernels")


def chi_square(counts, expected, shrink: float = 1.0) -> float:
    """How often a right sampler gives counts that are further from `expected` than these.

    counts     (cells,)   how often each cell came up; the cells are all there is
    expected   (cells,)   how often it should; one number where that is the same for all
    shrink     number     variance of a cell, over `expected` * (1 - 1 / cells): 1 where each
                          trial falls into one cell

    Pearson's sum of (count - expected)**2 / (expected * shrink) has cells - 1 degrees of freedom.
    Tests ask for more than `RARE`: they are at fixed seeds, and about one seed in a million would
    be unlucky.  A cell that is off by 8 standard deviations, sqrt(expected), fails them alone.
    """
    counts = np.asarray(counts, np.float64)
    distance = ((counts - expected) ** 2 / (expected * shrink)).sum()
    return float(chdtrc(counts.size - 1, distance))
