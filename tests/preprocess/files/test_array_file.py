"""Temporary arrays: what of them stays in the page cache."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from blockstore.format import PAGE_BYTES
from preprocess.files.array_file import ArrayFile

CACHESTAT = 451  # its number, on x86-64 and arm64
COUNT, PIECE = 1 << 24, 1 << 20  # 64 MiB, in pieces of 4 MiB


def cached_bytes(path) -> int:
    """Bytes of a file in the page cache; skips if the system does not tell."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    fd = os.open(path, os.O_RDONLY)
    try:
        if call(CACHESTAT, fd, ctypes.byref(span), ctypes.byref(found), 0):
            pytest.skip(f"cachestat: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    return int(found[0]) * PAGE_BYTES


def test_what_is_written_and_read_leaves_the_page_cache(tmp_path):
    path, maximum = tmp_path / "array", 0
    with ArrayFile(path, np.uint32) as file:
        for first in range(0, COUNT, PIECE):
            file.append(np.arange(first, first + PIECE, dtype=np.uint32))
            maximum = max(maximum, cached_bytes(path))
        if maximum >= 4 * COUNT and tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
            pytest.skip("tmpfs: files are memory")
        assert maximum <= 24 << 20
        for number, piece in enumerate(file.pieces(0, COUNT, PIECE)):
            first = number * PIECE
            assert np.array_equal(piece, np.arange(first, first + PIECE, dtype=np.uint32))
            maximum = max(maximum, cached_bytes(path))
    assert maximum <= 24 << 20
    assert cached_bytes(path) <= 8 << 20
