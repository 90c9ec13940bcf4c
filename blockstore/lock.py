"""A folder that one process at a time works in."""

import fcntl
import os
from pathlib import Path

from blockstore.errors import StoreBusy

LOCK = "lock"  # name of the file in it


def lock_folder(folder: Path, store: Path, work: str) -> int:
    """Make a folder and lock it; returns a descriptor, which holds the lock until it is closed.

    Whoever holds it may remove the folder.  Raises StoreBusy: another process has it, for `work` on
    `store`.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another run has just removed it
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), (folder / LOCK).stat()):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise StoreBusy(
                f"{store}: another process is {work} it, expected none; wait for it, or stop it"
            ) from error
        except FileNotFoundError:
            pass
        os.close(fd)
