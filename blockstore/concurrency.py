"""Threads, locks, queues and clocks of the block reader and of the engine.

There, only this module imports them from the standard library, and its names are looked up when
they are used: a test replaces them by a scheduler, which decides at each of them which thread goes
on (`tests/schedules.py`).  Otherwise they are the standard library's own objects.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, PriorityQueue, SimpleQueue
from threading import Barrier, Condition, Event, Lock, RLock, Thread, Timer, current_thread, local
from time import monotonic, perf_counter_ns, sleep

__all__ = [
    "Barrier", "Condition", "Empty", "Event", "Future", "Lock", "PriorityQueue", "RLock",
    "SimpleQueue", "Thread", "ThreadPoolExecutor", "Timer", "current_thread", "local", "monotonic",
    "perf_counter_ns", "sleep",
]  # fmt: skip
