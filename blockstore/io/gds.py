"""Rows of hop arrays and feature blocks in a store's files: to host memory, or by kvikio to a GPU.

For programs that read without the daemon.  What is read to the host is verified, page by page.
What kvikio reads to a device is not: no checksum is computed there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer
from blockstore.io.files import OpenFiles
from blockstore.store import BlockedFile, FileRange, read_verified

try:
    import kvikio
    import kvikio.defaults
except ImportError:  # an optional extra
    kvikio = None

STEP_PAGES = 1024  # read and verified at a time: 4 MiB


class HostReader:
    """Reads ranges of one array's files to host memory; every page is verified."""

    def __init__(self, file: BlockedFile) -> None:
        self._file = file
        self._opened = OpenFiles()
        self._scratch = aligned_buffer(STEP_PAGES * PAGE_BYTES)

    def read(self, ranges: Sequence[FileRange], out: NDArray[np.uint8]) -> None:
        """Read all ranges, one after the other.  Raises CorruptBlock, OSError."""
        at = 0
        for piece in ranges:
            self._read_one(piece, out[at : at + piece.num_bytes])
            at += piece.num_bytes

    def close(self) -> None:
        self._opened.close()

    def _read_one(self, piece: FileRange, out: NDArray[np.uint8]) -> None:
        before = piece.at // PAGE_BYTES - piece.offset // PAGE_BYTES
        stop = piece.offset + piece.num_bytes
        for page in range(piece.offset // PAGE_BYTES, -(-stop // PAGE_BYTES), STEP_PAGES):
            count = min(STEP_PAGES, -(-stop // PAGE_BYTES) - page)
            first = page * PAGE_BYTES
            crcs = self._file.crcs[before + page : before + page + count]
            pages = self._scratch[: count * PAGE_BYTES]
            read_verified(self._opened.fd(piece.path), pages, first, crcs, str(piece.path))
            low, high = max(first, piece.offset), min(first + count * PAGE_BYTES, stop)
            out[low - piece.offset : high - piece.offset] = self._scratch[
                low - first : high - first
            ]


class DeviceReader:
    """Reads ranges of files to the memory of a GPU, as kvikio can; nothing is verified."""

    def __init__(self) -> None:
        """Raises RuntimeError: kvikio does not work here."""
        if kvikio is None:
            raise RuntimeError('kvikio is not installed: pip install "blockstore[gpu]"')
        compatible = kvikio.defaults.is_compat_mode_preferred()
        self.how = "kvikio, POSIX reads" if compatible else "kvikio, GPUDirect Storage"
        self._files: dict[Path, Any] = {}

    def read(self, ranges: Sequence[FileRange], out: Any) -> None:
        """Read all ranges, one after the other; returns when they are there.

        out   uint8 (bytes,) on the device, contiguous; no work on it may be under way

        Raises OSError, CorruptBlock: the file ends before that.
        """
        begun, at = [], 0
        for piece in ranges:
            if piece.path not in self._files:
                self._files[piece.path] = kvikio.CuFile(piece.path, "r")
            part = out[at : at + piece.num_bytes]
            file = self._files[piece.path]
            begun.append((piece, file.pread(part, piece.num_bytes, piece.offset)))
            at += piece.num_bytes
        counts = [(piece, future.get()) for piece, future in begun]  # all, before any is judged
        for piece, count in counts:
            if count != piece.num_bytes:
                raise CorruptBlock(
                    f"{piece.path}+{piece.offset}: {count} bytes, expected {piece.num_bytes}; it "
                    "was truncated: ingest again, or restore it from a copy"
                )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
