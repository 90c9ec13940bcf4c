"""Values that may be read only while their lock is held."""

from typing import Any, Generic, TypeVar

from blockstore import concurrency

T = TypeVar("T")
Lock = Any  # `threading.RLock()`, whose type has no name


def is_held(lock: Lock) -> bool:
    held: bool = lock._is_owned()
    return held


class Guarded(Generic[T]):
    """`guarded()` is the value.  It asserts, except under `-O`, that the caller holds the lock."""

    def __init__(self, value: T, lock: Lock | None = None) -> None:
        """`lock`: an RLock, or a new one."""
        self.lock: Lock = concurrency.RLock() if lock is None else lock
        self._value = value

    def __call__(self) -> T:
        """The value; the caller has the lock."""
        assert is_held(self.lock), "the lock of this value is not held"
        return self._value
