from collections.abc import Iterator

import pytest

from loaderd.streams import service
from tests.loaderd.serving import WAIT_S, Serving


@pytest.fixture(autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    """The threads of one that a failed test has left would fail those that count threads."""
    yield
    for serving in list(Serving.open):
        serving.abandon()


@pytest.fixture
def nobody_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes from one step to the next: the machine may be busy."""
    monkeypatch.setattr(service, "STRAGGLER_WAIT_S", WAIT_S)
    monkeypatch.setattr(service, "LAST_S", WAIT_S)
    monkeypatch.setattr(service, "RANK_WAIT_S", WAIT_S)
