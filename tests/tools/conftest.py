import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where benches keep graphs and stores."""
    return tmp_path_factory.mktemp("bench")
