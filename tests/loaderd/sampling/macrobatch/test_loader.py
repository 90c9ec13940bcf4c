"""Which memory takes which macro-batch: what is needed or leased stays."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from loaderd.sampling.macrobatch.loader import Key, MacroLoader, MacroMemory

WAIT_S = 10


class Loading:
    """A loader of two or more memories, and what it has read."""

    def __init__(self, memories: int = 2) -> None:
        self.lock, self.read = threading.RLock(), threading.Condition()
        self.found: list[Key] = []
        self.bad: set[int] = set()
        self.defects: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        layout = SimpleNamespace(members=list(range(9)))
        plan: Any = SimpleNamespace(epoch_layout=lambda _epoch: layout)
        graph: Any = SimpleNamespace(load=self._load, num_members=1)
        self.memories = [MacroMemory(graph) for _ in range(memories)]
        self.loader = MacroLoader(plan, self.memories, self.lock, self)

    def _load(self, macro: int) -> None:
        if macro in self.bad:
            raise OSError("cannot read")
        self.found.append((0, macro))

    def macro_read(self, _served: Any, _read: Any) -> None:
        with self.read:
            self.read.notify_all()

    def thread_failed(self, error: Exception) -> None:
        self.defects.put(error)

    def want(self, *macros: int) -> None:
        with self.lock:
            self.loader.want([(0, m) for m in macros])

    def acquire(self, macro: int) -> MacroMemory:
        """For one batch, as soon as it is there.  Raises what its reading has raised."""
        found: list[MacroMemory] = []

        def there() -> bool:
            with self.lock:
                memory = self.loader.acquire((0, macro))
            found.extend([] if memory is None else [memory])
            return bool(found)

        with self.read:
            assert self.read.wait_for(there, WAIT_S)
        return found[0]

    def release(self, memory: MacroMemory) -> None:
        with self.lock:
            self.loader.release(memory)


@pytest.fixture
def loading():
    made = Loading()
    yield made
    with made.lock:
        made.loader.stop()
    made.loader.join()


def test_the_next_is_read_while_one_is_served_and_goes_where_nobody_needs_what_is_there(loading):
    loading.want(0, 1, 2)
    first, second = loading.acquire(0), loading.acquire(1)
    assert first is not second
    with loading.lock:
        assert loading.loader.is_next_ready((0, 0))
        assert loading.loader.is_held_up((0, 2))
    loading.want(1, 2)
    with loading.lock:
        assert loading.loader.is_held_up((0, 2))  # a batch of the first is leased
    loading.release(first)
    assert loading.acquire(2) is first
    assert loading.found == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("wanted", [(1, 2), (0, 1)], ids=["others", "the same"])
def test_what_cannot_be_read_is_an_error_and_is_tried_again_by_the_next_run(loading, wanted):
    loading.bad = {1}
    loading.want(0, 1)
    loading.acquire(0)
    with pytest.raises(OSError, match="cannot read"):
        loading.acquire(1)
    loading.bad = set()
    with loading.lock:
        loading.loader.begin()
    loading.want(*wanted)
    assert loading.acquire(1)


def test_a_defect_that_ends_the_thread_is_told(loading, monkeypatch):
    def fail(*_spans: Any) -> None:
        raise ArithmeticError("nobody foresaw this")

    monkeypatch.setattr(loading, "macro_read", fail)
    loading.want(0)
    assert str(loading.defects.get(timeout=WAIT_S)) == "nobody foresaw this"
    assert loading.defects.empty()
