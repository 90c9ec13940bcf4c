"""Kernel tests also run without the JIT (`NUMBA_DISABLE_JIT=1`) and with bounds checks."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from numba import config

settings.register_profile("compiled", deadline=None)
settings.register_profile("plain", deadline=None, max_examples=10)
settings.load_profile("plain" if config.DISABLE_JIT else "compiled")


@pytest.fixture(autouse=True, scope="session")
def _wrapping_integers() -> Iterator[None]:
    """Hashes wrap around at 64 bits: numpy's scalars warn of that, machine code does not."""
    with np.errstate(over="ignore"):
        yield
