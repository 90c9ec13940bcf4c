"""`.npy` files, alone or in `.npz`, read in pieces without mmap and without unpickling."""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from blockstore.io.files import write_exact
from preprocess.errors import BadInput
from preprocess.files.strided import Fill, Placed, StoredArray, c_strides

_READ_HEADER = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
# numpy parses the header with Python's own parser, whose errors for arbitrary bytes pass through
_UNREADABLE = (
    ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError, OverflowError,
)  # fmt: skip
# of a zip file; NotImplementedError for compression or encryption that zipfile does not support
_DAMAGED = (BadZipFile, zlib.error, EOFError, struct.error, NotImplementedError, RuntimeError)
_ZIP_LOCAL = struct.Struct("<26xHH")  # lengths of name and extra field in a local file header
_PART_BYTES = 1 << 18  # decompressed at a time
_MAX_SHOWN = 8  # names
_MAX_WORD_BYTES = 64
_SAVE_AGAIN = "save it again with numpy.save"
_LIST_HEADER_BYTES = 128  # size of numpy's header for any one-dimensional array of numbers


class _Header(NamedTuple):
    """The header of a `.npy` file."""

    shape: tuple[int, ...]
    fortran: bool
    stored: np.dtype[Any]
    num_bytes: int

    @property
    def fortran_order(self) -> bool:
        """Whether the array is in Fortran order and that makes a difference."""
        return self.fortran and len(self.shape) > 1 and min(self.shape) > 1

    def placed(self, offset: int) -> Placed:
        """The array whose first item lies at `offset`."""
        strides = c_strides(self.shape)
        if self.fortran_order:
            strides = c_strides(self.shape[::-1])[::-1]
        return Placed(self.stored.str, self.shape, strides, offset)


class _NpyArray(StoredArray):
    """An array with an npy header.  Raises BadInput: its items are objects or records."""

    def __init__(self, path: Path, where: str, header: _Header, start: int) -> None:
        if header.stored.kind not in "biufc":
            kind = "Python objects" if header.stored.hasobject else f"items of {header.stored}"
            raise BadInput.at(where, kind, "plain numbers", _SAVE_AGAIN)
        super().__init__(path, where, f"{where}: header", header.placed(start))
        self.fortran_order = header.fortran_order


class NpyFile(_NpyArray):
    """A `.npy` file.

    Raises BadInput: missing, not an npy file, objects or records, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        with _translated(path, str(path)), path.open("rb") as f:
            header = _read_header(f)
        super().__init__(path, str(path), header, header.num_bytes)
        _check_size(str(path), path.stat().st_size, self._start + _num_bytes(header), header)


class RawFile(StoredArray):
    """A file of items in C order without a header.  Raises BadInput: missing, of another size."""

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
        placed = _Header(shape, False, np.dtype(dtype), 0).placed(0)
        super().__init__(path, str(path), f"{path}: header", placed)
        with _translated(path, str(path)), path.open("rb") as f:
            found = f.seek(0, os.SEEK_END)
        expected = self.size * self.dtype.itemsize
        if found != expected:
            raise BadInput.at(
                f"{path}: end", f"{found} bytes", f"{expected} for shape {shape} of {self.dtype}",
                "it has no header: is it whole, and of this graph?",
            )  # fmt: skip


class ZipArray(_NpyArray):
    """An array of a `.npz` file: read in place if it is not compressed, else decompressed in order.

    To read items in the middle of a compressed array, all before them must be decompressed.

    Raises BadInput: missing, no zip file, no such member, or as `NpyFile`; while it is read, damage
    that is detected by decompression or the checksum.
    """

    def __init__(self, path: Path, member: str) -> None:
        """`member`: name as passed to numpy.savez, without ".npy"."""
        where = f"{path}: {member}"
        with _member(path, member, "save it again with numpy.savez") as (f, info):
            header = _read_header(f)
            start = _data_offset(path, info) + header.num_bytes
        super().__init__(path, where, header, start)
        self._member = member
        self._packed = info.compress_type != ZIP_STORED
        self.seeks = not self._packed
        whole = start - header.num_bytes + info.compress_size <= path.stat().st_size
        expected = header.num_bytes + _num_bytes(header)
        _check_size(where, info.file_size, expected, header, whole)

    def _opened(self) -> AbstractContextManager[Fill]:
        return self._unpacked() if self._packed else super()._opened()

    @contextmanager
    def _unpacked(self) -> Iterator[Fill]:
        at = 0  # bytes of the items that have been decompressed

        def fill(view: memoryview, offset: int) -> None:
            nonlocal at
            assert offset >= at
            end = offset + len(view)
            while at < end:
                part = self._part(stream, (end if at >= offset else offset) - at)
                if at >= offset:
                    view[at - offset : at - offset + len(part)] = part
                at += len(part)

        with _member(self.path, self._member, "was it replaced?") as (stream, _):
            _read_header(stream)
            yield fill
            stream.read(1)  # the checksum is compared at the end

    def _part(self, stream: IO[bytes], maximum: int) -> bytes:
        part = stream.read(min(maximum, _PART_BYTES))
        if not part:
            raise BadInput.at(
                f"{self.where}: end", "the end of the data", f"{maximum} more bytes",
                "it became shorter while it was read",
            )  # fmt: skip
        return part


def read_word(path: Path, member: str) -> str:
    """Read a word, text or bytes, that `numpy.savez` wrote as an array without dimensions.

    Raises BadInput.
    """
    where = f"{path}: {member}"
    with _member(path, member, "is it another layout?") as (f, _):
        header = _read_header(f)
        fits = header.shape == () and header.stored.kind in "SU"
        if not fits or header.stored.itemsize > _MAX_WORD_BYTES:
            raise BadInput.at(
                f"{where}: header", f"shape {header.shape} of {header.stored}", "one word",
                "is it another layout?",
            )  # fmt: skip
        raw = f.read(header.stored.itemsize)
    if len(raw) != header.stored.itemsize:
        raise BadInput.at(f"{where}: end", f"{len(raw)} bytes", header.stored.itemsize, _SAVE_AGAIN)
    word = np.frombuffer(raw, header.stored)[0]
    return word.decode("latin-1") if isinstance(word, bytes) else str(word)


def list_members(path: Path) -> list[str]:
    """Names of the arrays in a `.npz` file.  Raises BadInput."""
    with _translated(path, str(path)), ZipFile(path) as file:
        names = [name for name in file.namelist() if name.endswith(".npy")]
    return [name.removesuffix(".npy") for name in names]


@contextmanager
def _member(path: Path, member: str, remedy: str) -> Iterator[tuple[IO[bytes], ZipInfo]]:
    """Open a member of a `.npz` file at its npy header.  Raises BadInput: missing, damaged."""
    with _translated(path, f"{path}: {member}"), ZipFile(path) as file:
        if f"{member}.npy" not in file.namelist():
            names = [name.removesuffix(".npy") for name in file.namelist()]
            listed = ", ".join(names[:_MAX_SHOWN]) or "nothing"
            raise BadInput.at(path, f"no array {member!r}", f"it beside {listed}", remedy)
        info = file.getinfo(f"{member}.npy")
        with file.open(info) as stream:
            yield stream, info


def has_header(path: Path) -> bool:
    """Whether a file begins like an npy file.  Raises BadInput: it is missing."""
    with _translated(path, str(path)), path.open("rb") as f:
        return f.read(len(npy_format.MAGIC_PREFIX)) == npy_format.MAGIC_PREFIX


@contextmanager
def _translated(path: Path, where: str) -> Iterator[None]:
    """Translate errors of opening, parsing the header and decompressing into BadInput."""
    try:
        yield
    except BadInput:
        raise
    except FileNotFoundError as error:
        raise BadInput.at(path, "no file: it is missing", "an npy file", "add it") from error
    except OSError as error:
        raise BadInput.at(where, error.strerror or error, "an npy file", _SAVE_AGAIN) from error
    except _UNREADABLE as error:
        expected = "that of an npy file"
        raise BadInput.at(
            f"{where}: header", " ".join(str(error).split()), expected, _SAVE_AGAIN
        ) from error
    except _DAMAGED as error:
        raise BadInput.at(
            where, " ".join(str(error).split()), "a whole npz file", "copy it again"
        ) from error


def _read_header(f: IO[bytes]) -> _Header:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers that Python 2 wrote
        version = npy_format.read_magic(f)
        if version not in _READ_HEADER:
            raise ValueError(f"npy version {version}")
        shape, fortran, stored = _READ_HEADER[version](f)
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    return _Header(shape, bool(fortran), stored, f.tell())


def _num_bytes(header: _Header) -> int:
    return prod(header.shape) * header.stored.itemsize


def _check_size(where: str, found: int, expected: int, header: _Header, whole: bool = True) -> None:
    if found < expected or not whole:
        raise BadInput.at(
            f"{where}: end", f"{found} bytes", f"{expected} for shape {header.shape}",
            "the file is truncated: copy it again",
        )  # fmt: skip


def _data_offset(path: Path, info: ZipInfo) -> int:
    """Offset of a member's data: its local header may be longer than its entry in the index."""
    with path.open("rb") as f:
        f.seek(info.header_offset)
        raw = f.read(_ZIP_LOCAL.size)
    name_bytes, extra_bytes = _ZIP_LOCAL.unpack(raw)
    return info.header_offset + _ZIP_LOCAL.size + int(name_bytes) + int(extra_bytes)


class NpyWriter(ExitStack):
    """Writes an `.npy` file: the header, then items in order.  A context manager.

    Raises OutOfSpace.
    """

    def __init__(self, path: Path, shape: tuple[int, ...] | None, dtype: Any) -> None:
        """`shape`: None for a list, whose length is written when the file is closed."""
        super().__init__()
        self.path, self._shape, self._dtype = path, shape, np.dtype(dtype)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.callback(os.close, self._fd)
        self._start = self._items = 0
        self._start = self._write_header()
        if shape is None:
            self.push(self._finish)

    def append(self, values: NDArray[Any]) -> None:
        self.put(self._items, values)
        self._items += values.size

    def put(self, first: int, values: NDArray[Any]) -> None:
        """Write items at any position `first`."""
        raw = byte_view(np.ascontiguousarray(values, self._dtype))
        offset = self._start + first * self._dtype.itemsize
        write_exact(self._fd, raw, offset, str(self.path))

    def _write_header(self) -> int:
        shape = (self._items,) if self._shape is None else self._shape
        descr = npy_format.dtype_to_descr(self._dtype)
        raw = io.BytesIO()
        npy_format.write_array_header_1_0(
            raw, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        assert self._shape is not None or len(raw.getbuffer()) == _LIST_HEADER_BYTES
        write_exact(self._fd, raw.getbuffer(), 0, str(self.path))
        return len(raw.getbuffer())

    def _finish(self, _kind: object, error: object, _trace: object) -> None:
        if error is None:
            self._write_header()
