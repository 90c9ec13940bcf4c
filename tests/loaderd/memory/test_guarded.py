"""A table that is used without its lock is found out."""

import threading

import pytest

from loaderd.memory.guarded import Guarded, is_held


def test_only_the_thread_that_has_the_lock_sees_the_value():
    table: Guarded[dict[int, int]] = Guarded({1: 2})
    with table.lock:
        assert table() == {1: 2}
        found: list[bool] = []
        other = threading.Thread(target=lambda: found.append(is_held(table.lock)))
        other.start()
        other.join()
        assert found == [False]
    with pytest.raises(AssertionError, match="not held"):
        table()
