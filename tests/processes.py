"""Our commands as forks of a process that has imported them: a second less for each.

A `Popen` here is one of `subprocess` in all but this: `python -m loaderd ...`, with nothing asked
for but streams, a folder and an environment, begins as a fork of `tests.zygote`.  It has a pid of
its own, is waited for and killed, and runs its module from the first line; what it does not do is
import numba and the rest once more.  Tests of what happens before, or of limits that a process
inherits, ask for the fixture `fresh_processes`.
"""

import ctypes
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.zygote import COMMANDS

# import what else they need
ALSO = ("clients.train", "tests.loaderd.trainer", "tests.preprocess.reader",
        "tests.loaderd.hanging", "tests.loaderd.joined")  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
PLAIN = subprocess.Popen
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
ELSE = ("preexec_fn", "pass_fds", "shell", "executable")  # asked for: no fork
NO_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; our commands begin as forks."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        words = [] if isinstance(given["args"], str) else list(map(os.fspath, given["args"]))
        is_ours = words[:2] == [sys.executable, "-m"] and words[2] in (*COMMANDS, *ALSO)
        if not is_ours or any(given[name] for name in ELSE):
            super()._execute_child(*arguments)
            return
        try:
            streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            self.pid = _fork(words[2:], given["cwd"], given["env"], streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(given[name] for name in PIPES))


@contextmanager
def fresh() -> Iterator[None]:
    """Meanwhile our commands begin as any other, and import what they need."""
    with patch.object(subprocess, "Popen", PLAIN):
        yield


def _fork(words: list[str], cwd: Any, env: Any, streams: list[int]) -> int:
    """The pid of a new child of this process; streams of -1 are this process's own."""
    zygote = _zygote(os.getpid())
    request = {
        "words": words,
        "cwd": str(Path(cwd or ".").absolute()),
        "env": dict(os.environ if env is None else env),
    }
    fds = [own if fd == -1 else fd for own, fd in enumerate(streams)]
    socket.send_fds(zygote, [json.dumps(request).encode()], fds)
    answer = zygote.recv(32)
    assert answer, "the process that forks has ended"
    return int(answer)


@cache
def _zygote(pid: int) -> socket.socket:
    """Where the process `pid`, this one, asks for forks; it may wait for them as for children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fd = theirs.fileno()
        words = [sys.executable, "-m", "tests.zygote", str(fd)]
        process = PLAIN(
            words, cwd=ROOT, pass_fds=[fd], stdin=subprocess.DEVNULL, env=os.environ | NO_THREADS
        )
    process.returncode = 0  # it ends when nobody can ask any more: there is no moment to wait
    return ours


def run_main(*words: str) -> int:
    """Run the module of a command in this process: what it imports is here.  Its exit code."""
    with patch.object(sys, "argv", list(words)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that are imported already
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
