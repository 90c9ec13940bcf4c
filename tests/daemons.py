"""A real daemon for a test: its process, waited for and ended."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STOP_S = WAIT_S = 60


def spawn(store: Path, endpoint: str, *options: str) -> "subprocess.Popen[str]":
    """Start `loaderd serve` and wait until it says that it serves."""
    command = [sys.executable, "-m", "loaderd", "serve", str(store), "--endpoint", endpoint]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("serving"):
        _, errors = process.communicate(timeout=STOP_S)
        raise AssertionError(f"no daemon: {line!r} {errors!r}")
    return process


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that another process does, and that it tells nobody."""
    end, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < end, what
        pause.wait(0.01)


def stop(process: "subprocess.Popen[str]") -> int:
    """SIGTERM, and the exit code."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode


@contextmanager
def daemon(store: Path, mem: str = "32M", workers: int = 2, *options: str) -> Iterator[str]:
    """The endpoint of a daemon that serves the store; it must drain to exit code 0."""
    with tempfile.TemporaryDirectory(prefix="loaderd-") as folder:
        endpoint = f"ipc://{folder}/daemon.sock"
        process = spawn(store, endpoint, "--mem", mem, "--workers", str(workers), *options)
        try:
            yield endpoint
        finally:
            code = stop(process)
        assert code == 0
        assert list(Path(folder).iterdir()) == []
