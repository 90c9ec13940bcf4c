"""Work in a process that is killed at one of its calls of the operating system."""

import os
import signal
from collections.abc import Callable, Iterable


def counted(call: Callable[..., object], seen: list[int], last: int) -> Callable[..., object]:
    """The call, before whose so many-th time, of all that share `seen`, this process is killed."""

    def count(*words: object, **named: object) -> object:
        seen[0] += 1
        if seen[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*words, **named)

    return count


def kill_at(work: Callable[[], object], calls: Iterable[str], last: int) -> None:
    """Do the work in a process that is killed before the so many-th of these calls of `os`."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    try:
        seen = [0]
        for name in calls:
            setattr(os, name, counted(getattr(os, name), seen, last))
        work()
    finally:
        os._exit(1)
