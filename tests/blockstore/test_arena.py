"""The arena's memory: on huge pages where there are any, and mapped so that they fit."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from blockstore.io import arena as arena_module
from blockstore.io.arena import Arena
from blockstore.io.mapping import HUGE_BYTES, Mapping, map_shared

SLOTS, SLOT_BYTES = 5, 1 << 20  # two huge pages and a half


@contextmanager
def shared_file(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("test")
    os.pwrite(fd, content, 0)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("writable", [True, False])
def test_a_mapping_begins_where_a_huge_page_may(writable):
    with shared_file(bytes(range(256)) * 20) as fd:
        mapped = map_shared(fd, 5000, writable)
        assert mapped.array(5000).ctypes.data % HUGE_BYTES == 0
        assert mapped.array(7, 300).tolist() == list(range(44, 51))
        assert mapped.array(5000).flags.writeable == writable
        if writable:
            mapped.array(1, 4999)[0] = 77
            assert os.pread(fd, 1, 4999) == b"M"


def test_a_mapping_goes_with_its_last_array():
    def maps() -> int:
        with Path("/proc/self/maps").open() as lines:
            return sum("memfd:test" in line for line in lines)

    with shared_file(bytes(5000)) as fd:
        array = map_shared(fd, 5000, writable=False).array(10)
        assert maps() == 1
        del array
        assert maps() == 0


def test_what_cannot_be_mapped_is_an_error():
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        map_shared(reading, 5000, writable=False)
    os.close(reading)
    os.close(writing)


def test_memory_comes_on_huge_pages_where_the_kernel_has_them():
    with closing(Arena(SLOTS, SLOT_BYTES)) as arena:
        if not arena.huge_bytes:
            pytest.skip("this kernel gives none: see `loaderd doctor`")
        assert arena.huge_bytes == 2 * HUGE_BYTES
        # the kernel may take a page out of the page table at any time; a touch brings it back
        assert not arena.data[:: HUGE_BYTES // 2].any()
        with Path("/proc/self/smaps").open() as lines:
            text = lines.read().partition(f"{arena.data.ctypes.data:x}-")[2]
        mapped = text[text.index("ShmemPmdMapped:") :].split()[1]
        assert int(mapped) << 10 == arena.huge_bytes


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_memory_comes_on_small_pages_where_there_are_no_huge_ones(monkeypatch, code):
    """Of a kernel that knows none, or has too few; they are not asked for again and again."""
    asked, real = [], Mapping.advise

    def advise(self, advice, start, num_bytes):
        if advice == 25:
            asked.append(start)
            raise OSError(code, os.strerror(code))
        real(self, advice, start, num_bytes)

    monkeypatch.setattr(Mapping, "advise", advise)
    monkeypatch.setattr(arena_module, "_POPULATE_STEP", HUGE_BYTES)
    with closing(Arena(16, SLOT_BYTES)) as arena:
        assert arena.huge_bytes == 0
        assert asked == [0, HUGE_BYTES, 2 * HUGE_BYTES, 3 * HUGE_BYTES]
        assert os.fstat(arena.fd).st_blocks * 512 >= 16 * SLOT_BYTES  # all of it was taken
        assert not np.any(arena.data)
