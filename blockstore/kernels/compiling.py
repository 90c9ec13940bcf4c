"""Compiles in a child process, so that the compiler takes no memory of the process that asks.

Compiling a kernel takes up to 200 MiB, which a process does not get back; loading one that is in
the cache takes little.  So a process whose memory is bounded has a child compile into the cache
that both share (`use_child`), and loads from there.  The child ends when nobody has asked for some
seconds, or when the process that asks has ended.
"""

import contextlib
import importlib
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from blockstore.kernels import jit

_IDLE_S = 5.0  # that the child waits for a further kernel
_DONE, _FAILED = b"\1", b"\0"


class LogEvent(Protocol):
    """Receives events of the compiler."""

    def __call__(self, event: str, **fields: object) -> object: ...


class CompilerProcess:
    """A child that compiles one kernel after the other; started when it is needed.

    `compile` is called by one thread at a time: whoever has numba's lock for compiling.
    """

    def __init__(self, tell: LogEvent) -> None:
        self.awaited = ""  # the kernel that is being compiled
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def compile(self, function: Any, signature: Any) -> bool:
        """Whether the kernel is in the cache now; if not, this process has to compile it."""
        module, name = function.__module__, function.__qualname__
        asked = pickle.dumps((module, name, signature))  # a pickle tells where it ends
        self.awaited = f"{module}.{name}"
        try:
            # a child that was idle for too long may end just as it is asked
            return self._ask(asked) or self._ask(asked)
        finally:
            self.awaited = ""

    def _ask(self, asked: bytes) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            try:
                process = self._process = self._start()
            except OSError:
                return False
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(asked)
            process.stdin.flush()
            answer = process.stdout.read(1)
        except (BrokenPipeError, ValueError):  # `_wait` has closed the pipes
            answer = b""
        if answer == b"":  # it has ended, or was killed
            process.wait()
        self._count += answer == _DONE
        return answer == _DONE

    def _start(self) -> "subprocess.Popen[bytes]":
        # a session of its own: Ctrl-C in a terminal is for the process that asks
        process = subprocess.Popen(  # noqa: S603 a module of ours, by this interpreter
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._tell(
            "compiling kernels", first=self.awaited, process=process.pid,
            reason="they are not in the cache; batches wait for them, up to a minute; "
            "`blockstore warm` compiles ahead",
        )  # fmt: skip
        threading.Thread(target=self._wait, args=(process,), name="compiler", daemon=True).start()
        return process

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        begun, before = time.monotonic(), self._count
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        seconds = round(time.monotonic() - begun, 1)
        self._tell("kernels compiled", kernels=self._count - before, seconds=seconds)


_compiler: CompilerProcess | None = None


def use_child(tell: LogEvent) -> None:
    """From now on kernels of this process that can be cached are compiled by a child.

    tell   gets `compiling kernels` when a child starts, `kernels compiled` when it has ended
    """
    global _compiler
    _compiler = CompilerProcess(tell)
    jit.compile_by(_compiler.compile)


def awaited_kernel() -> str:
    """The kernel that this process waits for now; "": none."""
    return "" if _compiler is None else _compiler.awaited


def _next_asked() -> tuple[str, str, Any] | None:
    """The next request; None: no more will come."""
    # the parent waits for each answer: no request is in a buffer while `select` waits for it
    if not select.select([sys.stdin], [], [], _IDLE_S)[0]:
        return None
    try:
        asked: tuple[str, str, Any] = pickle.load(sys.stdin.buffer)  # noqa: S301 who started this
    except (EOFError, pickle.UnpicklingError):
        return None
    return asked


def main() -> None:
    """The child: compile what is asked for, and say whether that went well."""
    # if memory is short, the child is killed, and not the process that serves
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    out = os.dup(1)
    os.dup2(2, 1)  # whatever is printed is no answer
    with contextlib.suppress(BrokenPipeError):  # who asked has been killed
        while asked := _next_asked():
            module, name, signature = asked
            try:
                getattr(importlib.import_module(module), name).compile(signature)
            except Exception as error:
                sys.stderr.write(f"{module}.{name}: {type(error).__name__}: {error}\n")
                os.write(out, _FAILED)
            else:
                os.write(out, _DONE)


if __name__ == "__main__":
    main()
