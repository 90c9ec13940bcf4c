"""Frees the memory of a daemon that has died, although clients still have it mapped.

    python -I -S reclaim.py LIFELINE ARENA STAMP

A client that is stopped, or does not look at its dataset for an hour, keeps the arena mapped, and
the memory stays charged to the container in which the next daemon is to start.  So each daemon has
a child, this file as a process of its own (about 3 MB, beside `--mem`), which waits until the
daemon has ended, by whatever signal, and then empties the arena.  It imports nothing of ours, and
no signal but SIGKILL ends it.  Clients that read the memory afterwards see zeros, and the stamp
behind the slots, which is zeroed first, tells them so: see `Session.check_intact`.
"""

import contextlib
import fcntl
import mmap
import os
import signal
import struct
import sys

_STEP_BYTES = 1 << 30  # mapped at a time: the limit of address space (ulimit -v) may be near
# ioctls for the flags of an inode: Linux, include/uapi/linux/fs.h
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
_LIFELINE_FD, _ARENA_FD = 3, 4


def reclaim_later(arena_fd: int, stamp: int) -> int:
    """Start the process that empties the arena once this one has ended.

    arena_fd   opened for writing
    stamp      see `Arena`

    Returns the descriptor whose closing tells that process: leave it open.  Raises OSError.
    """
    lifeline, held = os.pipe()
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    # duplicates above those numbers: one of the two may be 3 or 4 itself
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (lifeline, arena_fd)]
    targets = (_LIFELINE_FD, _ARENA_FD)
    moves = [(os.POSIX_SPAWN_DUP2, *pair) for pair in zip(sources, targets, strict=True)]
    words = [sys.executable, "-I", "-S", __file__, *map(str, (*targets, stamp))]
    try:
        os.posix_spawn(
            words[0], words, os.environ, file_actions=[*quiet, *moves], setsid=True,
            setsigmask={signal.SIGTERM, signal.SIGINT, signal.SIGHUP},
        )  # fmt: skip
    except BaseException:
        os.close(held)
        raise
    finally:
        for fd in (lifeline, *sources):
            os.close(fd)
    return held


def set_immutable(fd: int, immutable: bool) -> None:
    """Set whether nobody can open a file for writing.  Raises OSError: it cannot be set here."""
    (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))
    flags = flags | _IMMUTABLE if immutable else flags & ~_IMMUTABLE
    fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags))


def empty(arena: int, stamp: int) -> None:
    """Zero the stamp, then free all pages; waits for clients that lent views of them."""
    fcntl.flock(arena, fcntl.LOCK_EX)
    with contextlib.suppress(OSError):  # it was not set: see `Arena`
        set_immutable(arena, False)
    size = os.fstat(arena).st_size
    last = stamp // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(arena, size - last, offset=last) as end:
        end[stamp - last : stamp - last + 8] = bytes(8)
    for start in range(0, size, _STEP_BYTES):
        with mmap.mmap(arena, min(_STEP_BYTES, size - start), offset=start) as part:
            part.madvise(mmap.MADV_REMOVE)


if __name__ == "__main__":
    lifeline, arena, stamp = map(int, sys.argv[1:])
    os.read(lifeline, 1)  # returns when the daemon's end is closed: nothing is ever written
    empty(arena, stamp)
