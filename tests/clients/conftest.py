"""Processes of a training job, for all tests of a module."""

import pytest


@pytest.fixture(scope="module")
def ranks(request):
    """A `tests.ranks.Pool` of as many processes as `RANKS` of the module says."""
    pytest.importorskip("torch")
    from tests.ranks import pool

    with pool(request.module.RANKS) as opened:
        yield opened
