"""Settings for all tests of the pipeline, which also run without the JIT."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from numba import config

settings.register_profile("compiled", deadline=None)  # first calls compile
settings.register_profile("plain", deadline=None, max_examples=10)
settings.load_profile("plain" if config.DISABLE_JIT else "compiled")


@pytest.fixture(autouse=True, scope="package")
def unsafe() -> Iterator[None]:
    """Nothing is flushed to disk: these stores are small, and many; kills are of processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
