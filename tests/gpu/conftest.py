"""Everything here needs a CUDA device, and says so where there is none."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and skip them with the reason."""
    here = Path(__file__).parent
    missing = "" if torch.cuda.is_available() else "torch finds no CUDA device here"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
