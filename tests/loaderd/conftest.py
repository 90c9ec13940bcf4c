import pytest

from loaderd.streams import service
from tests.loaderd.serving import WAIT_S


@pytest.fixture
def nobody_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes from one step to the next: the machine may be busy."""
    monkeypatch.setattr(service, "STRAGGLER_WAIT_S", WAIT_S)
    monkeypatch.setattr(service, "LAST_S", WAIT_S)
