"""Settings for all tests of the pipeline, which also run without the JIT."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def unsafe() -> Iterator[None]:
    """Nothing is flushed to disk: these stores are small, and many; kills are of processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
