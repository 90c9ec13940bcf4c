"""Runs in a process of their own, killed after a while."""

import os
import signal
import time
from collections.abc import Callable


def run_and_kill(run: Callable[[], object], after_s: float) -> bool:
    """Whether it had ended by itself."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + after_s
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
