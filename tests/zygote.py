"""A process that has imported our commands, and forks to become one: nothing is imported again.

    python -m tests.zygote FD

FD is a socket.  A request is JSON, `{"words": [MODULE, ...], "cwd": ..., "env": {...}}`, with the
three standard streams; the answer is the pid of a process that runs `python -m MODULE ...`.  Its
parent has ended, so that whoever of its ancestors is a subreaper can wait for it.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from blockstore.kernels.crc import page_crcs

COMMANDS = ("loaderd", "preprocess")  # imported before the first fork
MAX_REQUEST = 1 << 20


def prepare() -> None:
    """Import the commands, and what numba and typer load with the first kernel and command."""
    importlib.import_module("loaderd.cli.commands")
    for name in COMMANDS:
        importlib.import_module(f"{name}.__main__")
        del sys.modules[f"{name}.__main__"]  # runpy runs it
    app = typer.Typer()
    app.command()(_with_an_option)
    app([], standalone_mode=False)
    page_crcs(np.zeros(4096, np.uint8), 1, np.zeros(1, np.uint32))
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a process with threads does not fork well"
    gc.collect()
    gc.freeze()


def _with_an_option(number: Annotated[int, typer.Option()] = 1) -> None:
    pass


def begun(server: socket.socket) -> list[str] | None:
    """In each process that is begun: its words.  In the first one: None, when nobody asks more."""
    while True:
        frame, streams, _, _ = socket.recv_fds(server, MAX_REQUEST, 3)
        if not frame:
            return None
        reading, writing = os.pipe()
        middle = os.fork()
        if not middle:
            if pid := os.fork():
                os.write(writing, b"%d" % pid)
                os._exit(0)
            os.close(reading)
            os.close(writing)
            return _become(json.loads(frame), streams)
        os.close(writing)
        os.waitpid(middle, 0)  # only then has the new process another parent
        server.send(os.read(reading, 32))
        for fd in (reading, *streams):
            os.close(fd)


def _become(request: dict, streams: list[int]) -> list[str]:
    for standard, fd in enumerate(streams):
        os.dup2(fd, standard)
    os.closerange(3, max(streams) + 1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return request["words"]


if __name__ == "__main__":
    prepare()
    asking = socket.socket(fileno=int(sys.argv[1]))
    words = begun(asking)
    if words is not None:
        asking.detach()
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
