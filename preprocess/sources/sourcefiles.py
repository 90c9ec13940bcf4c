"""Detect changes in the files of a source during an ingest.

An ingest reads some files several times, hours apart.  A store made from two versions of a file
would look sound but be wrong, so files are checked again after the last stage that reads them.

`read_description` reads files that describe other files.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple, TypeVar

import google_crc32c
import msgspec

from preprocess.errors import BadInput

_PIECE_BYTES, _PIECES = 64 << 10, 16  # checksummed of each file: all of it up to 1 MiB
_Records = TypeVar("_Records")


class FileStat(NamedTuple):
    """Metadata of a file; for a folder only its inode."""

    inode: int
    size: int
    mtime_ns: int


class SourceFiles:
    """A snapshot of files: inode, size, mtime and a checksum of pieces of each."""

    def __init__(
        self, files: Sequence[Path], before: Mapping[Path, FileStat] | None = None
    ) -> None:
        """`before`: result of `stats_below` before the source was opened.

        For a folder only the inode counts, which shows whether it was replaced.
        Raises BadInput: a file is missing, or has changed since `before`.
        """
        self._poll_scheduled = {path: (_stat(path), _pieces(path)) for path in files}
        for path, (found, _) in self._poll_scheduled.items():
            if before is not None and path in before and before[path] != found:
                raise _changed(path, before[path], found)

    def digest(self) -> bytes:
        """The whole snapshot as bytes, for the signature of a resumable run."""
        return "\n".join(
            f"{path.name} {stat} {pieces.hex()}"
            for path, (stat, pieces) in self._poll_scheduled.items()
        ).encode()

    def check(self) -> None:
        """Raises BadInput if a file has changed; the message says how."""
        for path, (before, pieces) in self._poll_scheduled.items():
            found = _stat(path)
            if found != before:
                raise _changed(path, before, found)
            if _pieces(path) != pieces:
                raise _refusal(path, "other content of the same size and time")

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which any error becomes BadInput if a file has changed; it names the file."""
        try:
            yield
        except Exception:
            self.check()
            raise


def stats_below(path: Path) -> dict[Path, FileStat]:
    """Stats of a file, or of everything below a folder."""
    found = {}
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(BadInput):  # a dangling link, or a file that has just been removed
            found[file] = _stat(file)
    return found


def _stat(path: Path) -> FileStat:
    try:
        stat = path.stat()
    except OSError as error:
        raise _refusal(path, f"no file to read ({error.strerror})") from error
    if S_ISDIR(stat.st_mode):
        return FileStat(stat.st_ino, 0, 0)
    return FileStat(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _pieces(path: Path) -> bytes:
    """Checksum of pieces spread evenly over a file."""
    crc = google_crc32c.Checksum()
    if path.is_dir():
        return bytes(crc.digest())
    try:
        with path.open("rb") as file:
            # after fsync, pages that other processes write by mmap are clean, so that their next
            # write changes the mtime; a write to a page that is dirty already would not
            with suppress(OSError):
                os.fsync(file.fileno())
            last = max(0, os.fstat(file.fileno()).st_size - _PIECE_BYTES)
            for i in range(_PIECES + 1):
                file.seek(last * i // _PIECES)
                crc.update(file.read(_PIECE_BYTES))
    except OSError as error:
        raise _refusal(path, f"no file to read ({error.strerror})") from error
    return bytes(crc.digest())


def _changed(path: Path, before: FileStat, found: FileStat) -> BadInput:
    if found.size != before.size:
        return _refusal(path, f"{found.size} bytes, {before.size} when it was opened")
    if found.inode != before.inode:
        return _refusal(path, "another file under this name than when it was opened")
    return _refusal(
        path, f"time of change {found.mtime_ns} ns, {before.mtime_ns} when it was opened"
    )


def _refusal(path: Path, found: str) -> BadInput:
    return BadInput.at(
        path, found, "a source that stays as it is during an ingest",
        "wait until nothing writes it, then run the command again",
    )  # fmt: skip


def read_description(
    path: Path, kind: type[_Records], expected: str = "a file that describes tables"
) -> _Records:
    """A JSON or YAML file as records of a type.  Raises BadInput."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        found = "no file: it is missing"
        raise BadInput.at(path, found, expected, "is the path right?") from error
    except OSError as error:
        raise BadInput.at(path, error.strerror, expected, "is the path right?") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=kind)
        return msgspec.yaml.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split()).replace("`", "'")
        raise BadInput.at(path, said, expected, "correct it") from error
