"""Kernel tests also run without the JIT (`NUMBA_DISABLE_JIT=1`) and with bounds checks."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def _wrapping_integers() -> Iterator[None]:
    """Hashes wrap around at 64 bits: numpy's scalars warn of that, machine code does not."""
    with np.errstate(over="ignore"):
        yield
