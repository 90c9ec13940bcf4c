"""Descriptors for whole-block I/O: O_DIRECT if the file system takes it, else buffered.

Also what it takes to have files and folders on disk.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blockstore.closing import Closing
from blockstore.errors import CorruptBlock, OutOfSpace, StoreExists
from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer, byte_view

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room for what is written
_MAX_OPEN = 64  # of `OpenFiles`: a large array has a thousand files
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def probe_direct(path: Path) -> str:
    """ "O_DIRECT" if a page of the file can be read so, else "buffered: <reason>"."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return f"buffered: {path.parent} refuses O_DIRECT ({error.strerror})"
    try:
        os.preadv(fd, [byte_view(aligned_buffer(PAGE_BYTES))], 0)
    except OSError as error:
        return f"buffered: {path.parent} refuses O_DIRECT ({error.strerror})"
    finally:
        os.close(fd)
    return "O_DIRECT"


def open_to_read(path: Path, direct: bool) -> int:
    """Descriptor of a shard.  Raises CorruptBlock: it is missing."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    except FileNotFoundError as error:
        raise CorruptBlock(f"{path}: missing, expected a shard of blocks") from error


class OpenFiles(Closing):
    """Descriptors of files that are read here and there, each opened when it is first read."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}

    def fd(self, path: Path) -> int:
        """A descriptor, open until the next call at least.  Raises CorruptBlock: no such file."""
        if path not in self._fds:
            if len(self._fds) == _MAX_OPEN:
                self.close()
            self._fds[path] = open_to_read(path, probe_direct(path) == "O_DIRECT")
        return self._fds[path]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def open_to_write(path: Path) -> tuple[int, bool]:
    """Descriptor of a new file and whether it takes O_DIRECT."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return os.open(path, flags, 0o666), False


def read_exact(fd: int, buffers: Sequence[memoryview], offset: int, where: str) -> None:
    """Fill all buffers from `offset` on.

    Raises CorruptBlock: the file ends before that; OSError, which names file and offset.
    """
    left = [b for b in buffers if len(b)]
    wanted = sum(len(b) for b in left)
    done = 0
    while left:
        try:
            count = os.preadv(fd, left, offset + done)
        except OSError as error:
            place = f"{where}+{offset + done}"
            raise OSError(error.errno, error.strerror, place) from error
        if count == 0:
            raise CorruptBlock(
                f"{where}+{offset}: file ends after {done} bytes, expected {wanted}; "
                "it was truncated: ingest again, or restore it from a copy"
            )
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


@contextmanager
def naming(path: Path, num_bytes: int) -> Iterator[None]:
    """Inside, errors of writing `num_bytes` bytes to a file name it, whatever code writes them.

    Raises OutOfSpace; OSError, which has the file's name.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _full(error, str(path), num_bytes) from error
        error.filename = error.filename or str(path)
        raise


def _full(error: OSError, where: str, num_bytes: int) -> OutOfSpace:
    return OutOfSpace(
        f"{where}: {os.strerror(error.errno or errno.ENOSPC)}, {num_bytes} bytes still to write; "
        "free some space, or choose another disk"
    )


def write_exact(fd: int, data: memoryview, offset: int, where: str) -> None:
    """Write all of `data` at `offset`.  Raises OutOfSpace."""
    done = 0
    try:
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
    except OSError as error:
        if error.errno in FULL:
            raise _full(error, f"{where}+{offset + done}", len(data) - done) from error
        error.filename = error.filename or where
        raise


def remove_leftovers(path: Path) -> None:
    """Remove what writers of this target that are no longer alive have left behind."""
    for folder in path.parent.glob(f".{path.name}.partial-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def check_free(target: Path, what: str = "it") -> None:
    """Raises StoreExists: there is something at the target's path."""
    if os.path.lexists(target):
        found = "exists already" if target.exists() else "is a link that leads nowhere"
        raise StoreExists(f"{target}: {found}; remove {what}, or choose another name")


def take_name(folder: Path, target: Path) -> None:
    """Rename a folder or a file, all of which is on disk, to its target.

    Raises StoreExists.
    """
    if os.path.lexists(target):  # the rename would only tell if it is not empty
        raise StoreExists(f"{target}: appeared while this was being written")
    folder.rename(target)
    flush(target.absolute().parent)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Gives a folder beside a target; at the end it is renamed to it, or removed after an error.

    Raises StoreExists, OutOfSpace.
    """
    remove_leftovers(target)
    folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
    folder.mkdir(parents=True)
    try:
        yield folder
        flush_tree(folder)
        take_name(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def missing_parents(path: Path) -> list[Path]:
    """Folders above a path that are not there yet; whoever makes them flushes their parents."""
    return [folder for folder in path.absolute().parents if not folder.exists()]


def flush_tree(folder: Path) -> None:
    """Flush a folder to disk, with every file and folder in it."""
    for inner, _, files in os.walk(folder):
        for name in files:
            flush(Path(inner, name))
        flush(Path(inner))


def flush_below(root: Path, path: str) -> None:
    """Flush what lies at a path in a tree, with the folders that lead there."""
    flush_tree(root / path)
    for folder in (root / path).relative_to(root).parents:
        for metadata in (root / folder).glob("zarr.json"):
            flush(metadata)
        flush(root / folder)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk.  Raises OutOfSpace."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path, os.fstat(fd).st_size):  # the disk may run out of room only here
            os.fsync(fd)
    finally:
        os.close(fd)
