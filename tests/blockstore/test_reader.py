"""What is on its way is waited for, whatever failed before it."""

import pytest

from blockstore.io.reader import wait_all


class _Asked:
    """Notes that it was waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waited = error, False

    def wait(self) -> None:
        self.waited = True
        if self.error is not None:
            raise self.error


def test_all_are_waited_for_and_the_first_error_is_told():
    asked = [_Asked(), _Asked(OSError("first")), _Asked(), _Asked(OSError("second"))]
    with pytest.raises(OSError, match="first"):
        wait_all(asked)
    assert all(one.waited for one in asked)
    wait_all([_Asked()])
    wait_all([])
