"""Whole reads and writes, whatever the kernel does of them at a time."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock
from blockstore.io.files import read_exact, write_exact

DATA = np.random.default_rng(3).integers(0, 256, 5000).astype(np.uint8).tobytes()
COUNTS = st.lists(st.integers(1, 900), max_size=12)  # of bytes that calls do, then all of it


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files") / "data"
    path.write_bytes(DATA)
    return path


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 800), max_size=5), offset=st.integers(0, 900), counts=COUNTS)
def test_a_read_goes_on_where_the_kernel_stopped(data_file, sizes, offset, counts):
    short, real = iter(counts), os.preadv

    def preadv(fd, buffers, at):
        maximum = next(short, 1 << 20)
        room = (
            [memoryview(b)[:maximum] for b in buffers[:1]] if maximum < len(buffers[0]) else buffers
        )
        return real(fd, room, at)

    buffers = [memoryview(bytearray(size)) for size in sizes]
    fd = os.open(data_file, os.O_RDONLY)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            read_exact(fd, buffers, offset, "data")
    finally:
        os.close(fd)
    assert b"".join(map(bytes, buffers)) == DATA[offset : offset + sum(sizes)]


def test_a_file_that_ends_early_is_named(data_file):
    fd = os.open(data_file, os.O_RDONLY)
    try:
        with pytest.raises(CorruptBlock, match=r"data\+4000: file ends after 1000 bytes, expected"):
            read_exact(fd, [memoryview(bytearray(700)), memoryview(bytearray(700))], 4000, "data")
    finally:
        os.close(fd)


@settings(deadline=None)
@given(offset=st.integers(0, 900), counts=COUNTS)
def test_a_write_goes_on_where_the_kernel_stopped(tmp_path_factory, offset, counts):
    short, real = iter(counts), os.pwrite
    path = tmp_path_factory.mktemp("write") / "data"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", lambda f, b, at: real(f, b[: next(short, 1 << 20)], at))
            write_exact(fd, memoryview(DATA), offset, "data")
    finally:
        os.close(fd)
    assert path.read_bytes() == bytes(offset) + DATA
