"""The files of a source as they were when it was opened, and whether they still are.

An ingest reads some files several times, hours apart.  A store made of two versions of a file looks
sound and is wrong, so the files are looked at again after the last stage that reads them.

Some say what the others hold: `read_description`.
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

_PIECE_BYTES, _PIECES = 64 << 10, 16  # of a file, that are looked at: all of one up to 1 MiB
_Records = TypeVar("_Records")


class FileStat(NamedTuple):
    """What the file system says of a file; of a folder only its inode."""

    inode: int
    size: int
    mtime_ns: int


class SourceFiles:
    """Each file's inode, size, time of change and pieces of its content, at one moment."""

    def __init__(
        self, files: Sequence[Path], before: Mapping[Path, FileStat] | None = None
    ) -> None:
        """`before`: as `stats_below` found files before the source was opened.

        Of a folder among the files only the inode counts: whether another one took its place.
        Raises BadInput: a file is missing, or is not as it was before.
        """
        self._looks = {path: (_stat(path), _pieces(path)) for path in files}
        for path, (found, _) in self._looks.items():
            if before is not None and path in before and before[path] != found:
                raise _changed(path, before[path], found)

    def digest(self) -> bytes:
        """Of all of it, for the signature of a run that may be resumed."""
        return "\n".join(
            f"{path.name} {stat} {pieces.hex()}" for path, (stat, pieces) in self._looks.items()
        ).encode()

    def check(self) -> None:
        """Raises BadInput: a file is not what it was; the message says what changed."""
        for path, (before, pieces) in self._looks.items():
            found = _stat(path)
            if found != before:
                raise _changed(path, before, found)
            if _pieces(path) != pieces:
                raise _refusal(path, "other content of the same size and time")

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, an error that a changed file led to becomes BadInput, which names the file."""
        try:
            yield
        except Exception:
            self.check()
            raise


def stats_below(path: Path) -> dict[Path, FileStat]:
    """Of a file, or of all files in a folder and in those inside it."""
    found = {}
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(BadInput):  # a link that leads nowhere, or a file that has just been removed
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
    """Checksum of pieces at places that the size decides."""
    crc = google_crc32c.Checksum()
    if path.is_dir():
        return bytes(crc.digest())
    try:
        with path.open("rb") as file:
            # pages that a process has mapped and written are clean afterwards: its next write to
            # one of them moves the time of change, which it would not while the page is dirty
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
