"""The daemon's process: its signals, from the first file to the last, service manager, heaps."""

import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_SIGNALS = 4096  # taken at a time
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_HEAPS = 2
_MAPPED = 4 << 20  # bytes; what is larger has pages of its own, and gives them back
_KEPT = 16 << 20  # bytes: eight messages of 1 MiB, encrypted, and the one that is being encrypted


class Signals:
    """Passes signals on to one receiver at a time; while there is none, they wait.

    Unlike handlers of the event loop these stay when the loop closes, so that at no moment a signal
    would end the process and leave files behind.
    """

    def __init__(self) -> None:
        """Takes over all three; call it in the main thread."""
        self.hang_up: Callable[[], object] | None = None  # called at SIGHUP; None: it is ignored
        self._receiver: Callable[[], object] | None = None
        self._waiting = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._arrived())
        signal.signal(signal.SIGHUP, lambda _number, _frame: self._hung_up())

    @contextmanager
    def to(self, receiver: Callable[[], object]) -> Iterator[None]:
        """Inside the `with`, `receiver` is called in the main thread for each signal."""
        self._receiver = receiver
        try:
            if self._waiting:
                self._arrived()
            yield
        finally:
            self._receiver = None

    @contextmanager
    def waking(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Inside the `with` signals wake the loop, which runs in the main thread.

        Receivers are called by Python code of that thread.  Without this, nothing wakes it for a
        signal that comes just before it goes to sleep, or that another thread has caught.
        """
        theirs, ours = socket.socketpair()
        for end in (theirs, ours):
            end.setblocking(False)
        loop.add_reader(ours, ours.recv, _MAX_SIGNALS)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(ours)
            theirs.close()
            ours.close()

    def _hung_up(self) -> None:
        if self.hang_up is not None:
            self.hang_up()

    def _arrived(self) -> None:
        if self._receiver is None:
            self._waiting = True
        else:
            self._waiting = False
            self._receiver()


def end_when_unused(path: Path) -> None:
    """Send this process SIGTERM when no other one holds a lock on a file (`flock`).

    It then keeps the lock until it has ended: whoever wants to use the daemon waits for that.
    Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def wait() -> None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="users", daemon=True).start()


def notify(*states: str) -> bool:
    """Send states such as "READY=1" to $NOTIFY_SOCKET; False if there is none or it is gone.

    Source: sd_notify(3): one datagram of lines; a leading @ stands for the abstract namespace.
    """
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    address = b"\0" + os.fsencode(name[1:]) if name[0] == "@" else os.fsencode(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            sender.connect(address)
            sender.send("\n".join(states).encode())
        except OSError:
            return False
    return True


def share_heaps() -> None:
    """Let all threads that begin from now on share two heaps; without glibc nothing is done.

    Each of many threads would have a heap of its own, which keeps what the thread's busiest moment
    took.  Hot paths allocate nothing, so that threads do not wait for each other.  libzmq does, for
    each message: a heap keeps `_KEPT` at its end, else pages of a message of 1 MiB would go back to
    the kernel and be cleared again for the next one, a quarter of the time of its thread.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, _HEAPS)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)
