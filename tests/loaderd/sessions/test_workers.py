"""Workers give their time in equal parts, whatever a step costs."""

import threading
import time
from collections import Counter

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
