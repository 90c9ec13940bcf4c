"""The scheduler of tests/schedules.py finds what it is there for."""

from collections.abc import Callable

import pytest

from blockstore import concurrency
from tests.schedules import Failed, schedule


def first_failure(work: Callable[[], None], maximum: int = 100) -> str:
    """What the first seed says that fails."""
    for seed in range(maximum):
        try:
            with schedule(seed):
                work()
        except Failed as error:
            return str(error)
    return ""


def run_all(*targets: Callable[[], None]) -> None:
    threads = [concurrency.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_locks_taken_in_another_order():
    def work() -> None:
        locks = concurrency.Lock(), concurrency.Lock()

        def take(first: int) -> None:
            with locks[first], locks[1 - first]:
                pass

        run_all(lambda: take(0), lambda: take(1))

    error = first_failure(work)
    assert "a deadlock" in error
    assert "a lock that <lambda> has" in error
    assert "locks[first], locks[1 - first]" in error


def test_a_notice_that_nobody_waits_for_yet():
    def work() -> None:
        changed, done = concurrency.Condition(), []

        def wait() -> None:
            if not done:  # looked at without the lock
                with changed:
                    changed.wait()

        def notify() -> None:
            with changed:
                done.append(1)
                changed.notify_all()

        run_all(wait, notify)

    assert "wait waits for a condition" in first_failure(work)


def test_an_increment_in_two_steps():
    def work() -> None:
        count, lock = [0], concurrency.Lock()

        def add() -> None:
            with lock:
                found = count[0]
            with lock:
                count[0] = found + 1

        run_all(add, add)
        concurrency.Thread(target=lambda: check(count[0] == 2)).start()

    def check(good: bool) -> None:
        assert good

    assert "AssertionError" in first_failure(work)


def test_what_is_right_passes():
    def work() -> None:
        count, lock, queue = [0], concurrency.RLock(), concurrency.SimpleQueue()
        changed, begun = concurrency.Condition(lock), concurrency.monotonic()

        def add() -> None:
            with lock, changed:
                count[0] += 1
                changed.notify_all()
            queue.put(count[0])

        def wait() -> None:
            with changed:
                assert changed.wait_for(lambda: count[0] == 2)
                assert not changed.wait_for(lambda: count[0] == 3, 60.0)
            assert concurrency.monotonic() >= begun + 60

        run_all(add, wait, add)
        assert sorted([queue.get(), queue.get()])[1] == 2
        with pytest.raises(concurrency.Empty):
            queue.get_nowait()
        with concurrency.ThreadPoolExecutor(1, "pool") as pool:
            assert pool.submit(max, 1, 2).result() == 2

    assert first_failure(work) == ""


def test_a_thread_that_does_not_end():
    def work() -> None:
        concurrency.Thread(target=concurrency.Event().wait, name="stays").start()

    assert "threads that did not end: ['stays']" in first_failure(work)


def test_equal_seeds_give_equal_schedules():
    def order(seed: int) -> tuple[list[int], int]:
        found: list[int] = []
        with schedule(seed) as scheduler:
            lock = concurrency.Lock()

            def work(number: int) -> None:
                for _ in range(3):
                    with lock:
                        found.append(number)

            run_all(*(lambda i=i: work(i) for i in range(3)))
        return found, scheduler.trace

    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len({tuple(found) for found, _ in orders}) > 5
