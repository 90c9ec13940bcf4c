"""crc32c of 4 KiB pages: by the processor's instruction, four pages at a time, or by table."""

import numpy as np
from numba import config, njit

from blockstore.kernels.intrinsics import HAS_CRC32, crc32_u64

PAGE_WORDS = 512  # of eight bytes
_POLYNOMIAL = 0x82F63B78  # of crc32c, reflected
_ONES = 0xFFFFFFFF


def _make_tables():
    """Slicing-by-eight tables, uint32 (8, 256)."""
    table = np.zeros((8, 256), np.uint32)
    for i in range(256):
        crc = i
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table[0, i] = crc
    for i in range(256):
        for t in range(1, 8):
            before = int(table[t - 1, i])
            table[t, i] = int(table[0, before & 255]) ^ (before >> 8)
    return table


_TABLES = _make_tables()


@njit(nogil=True, cache=True)
def _table_page(words, start):
    """crc32c of one page through the tables."""
    crc = np.uint64(_ONES)
    low = np.uint64(255)
    for i in range(start, start + PAGE_WORDS):
        word = words[i] ^ crc
        crc = np.uint64(0)
        for byte in range(8):
            entry = (word >> np.uint64(8 * byte)) & low
            crc ^= np.uint64(_TABLES[7 - byte, np.int64(entry)])
    return np.uint32(crc ^ np.uint64(_ONES))


if HAS_CRC32 and not config.DISABLE_JIT:

    @njit(nogil=True, cache=True)
    def _pages(words, num_pages, out):
        """Four pages side by side: the instruction takes three cycles and one can start each."""
        ones = np.uint64(_ONES)
        page = 0
        while page + 4 <= num_pages:
            a = b = c = d = ones
            start = page * PAGE_WORDS
            for i in range(start, start + PAGE_WORDS):
                a = crc32_u64(a, words[i])
                b = crc32_u64(b, words[i + PAGE_WORDS])
                c = crc32_u64(c, words[i + 2 * PAGE_WORDS])
                d = crc32_u64(d, words[i + 3 * PAGE_WORDS])
            out[page] = np.uint32(a ^ ones)
            out[page + 1] = np.uint32(b ^ ones)
            out[page + 2] = np.uint32(c ^ ones)
            out[page + 3] = np.uint32(d ^ ones)
            page += 4
        while page < num_pages:
            a = ones
            for i in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                a = crc32_u64(a, words[i])
            out[page] = np.uint32(a ^ ones)
            page += 1

else:

    @njit(nogil=True, cache=True)
    def _pages(words, num_pages, out):
        """One page after the other, by table."""
        for page in range(num_pages):
            out[page] = _table_page(words, page * PAGE_WORDS)


@njit(nogil=True, cache=True)
def page_crcs(data, num_pages, out):
    """crc32c of each 4 KiB page.

    data   uint8 (>= num_pages * 4096,)   8-byte aligned
    out    uint32 (>= num_pages,)
    """
    _pages(data.view(np.uint64), num_pages, out)


@njit(nogil=True, cache=True)
def find_bad_page(data, num_pages, expected):
    """The first page whose crc32c is not the expected one, int64, or -1.

    data      uint8 (>= num_pages * 4096,)   8-byte aligned
    expected  uint32 (>= num_pages,)
    """
    words = data.view(np.uint64)
    found = np.empty(64, np.uint32)
    for first in range(0, num_pages, 64):
        count = min(64, num_pages - first)
        _pages(words[first * PAGE_WORDS : (first + count) * PAGE_WORDS], count, found)
        for i in range(count):
            if found[i] != expected[first + i]:
                return np.int64(first + i)
    return np.int64(-1)
