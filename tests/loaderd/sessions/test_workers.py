"""Workers give their time in equal parts, whatever a step costs, and help each other if idle."""

import threading
import time
from collections import Counter

import pytest

from loaderd.sessions.workers import WorkerPool

WAIT_S = 30


def test_owners_of_long_and_of_short_steps_get_equal_times():
    workers, had, over = WorkerPool(1), Counter[int](), threading.Event()
    cost = {1: 0.004, 2: 0.001}

    def step(owner: int) -> None:
        time.sleep(cost[owner])
        had[owner] += 1
        if had[2] == 100:
            over.set()
        if not over.is_set():
            workers.soon(owner, lambda: step(owner))

    for owner in cost:
        for _ in range(4):  # as many on their way as a window allows
            workers.soon(owner, lambda owner=owner: step(owner))
    assert over.wait(WAIT_S)
    workers.close()
    assert 10 <= had[1] <= 60  # 25, by time; 100, in turn


def test_one_that_comes_late_does_not_get_what_it_never_asked_for():
    workers, order, over = WorkerPool(1), list[int](), threading.Event()

    def step(owner: int) -> None:
        time.sleep(0.002)
        order.append(owner)
        if len(order) == 40:
            workers.soon(2, lambda: step(2))
        if len(order) < 80:
            workers.soon(owner, lambda: step(owner))
        else:
            over.set()

    workers.soon(1, lambda: step(1))
    assert over.wait(WAIT_S)
    workers.close()
    assert set(order[:40]) == {1}
    assert 12 <= Counter(order[40:80])[1] <= 28  # half, and not none until the other has caught up


def test_idle_workers_share_steps_and_the_caller_goes_through_them_in_order():
    workers, both, seen = WorkerPool(2), threading.Barrier(3), list[int]()
    while workers.idle < 2:
        pass
    threads = set[int]()

    def do(i: int) -> None:
        threads.add(threading.get_ident())
        if i < 3:
            both.wait(WAIT_S)  # three are on their way at the same time
        assert i not in seen

    workers.share(20, do, seen.append)
    workers.close()
    assert seen == list(range(20))
    assert len(threads) == 3


def test_a_worker_alone_shares_with_nobody_and_waits_for_nobody():
    workers, seen, over = WorkerPool(1), list[int](), threading.Event()

    def step() -> None:
        workers.share(5, lambda _: None, seen.append)
        over.set()

    workers.soon(1, step)
    assert over.wait(WAIT_S)
    workers.close()
    assert seen == list(range(5))


@pytest.mark.parametrize("fails", ["do", "then"])
def test_after_an_error_no_step_is_being_done(fails):
    workers, running, lock = WorkerPool(2), 0, threading.Lock()
    while workers.idle < 2:
        pass

    def do(i: int) -> None:
        nonlocal running
        with lock:
            running += 1
        try:
            if (fails, i) == ("do", 7):
                raise OSError("cannot read")
        finally:
            with lock:
                running -= 1

    def then(i: int) -> None:
        if (fails, i) == ("then", 7):
            raise OSError("cannot read")
        assert i < 7  # those before it are done

    for _ in range(50):
        with pytest.raises(OSError, match="cannot read"):
            workers.share(1000, do, then)
        assert running == 0
    workers.close()
